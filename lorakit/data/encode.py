"""A row -> token ids and which of them are learnt.

Chat rows go through the tokenizer's own template. What is learnt is found by comparing renderings, so templates need
no generation markers: an assistant turn begins where the prompt for it ends, and ends with the first end token.
"""

from dataclasses import dataclass
from typing import Any

from lorakit.data.rows import BadRow
from lorakit.data.shapes import Chat, Plain, read_shape
from lorakit.errors import DataError

SENTINEL = "\u241elorakit\u241e"


@dataclass(frozen=True)
class Encoded:
    """Token ids of one row; ``learnt[i]`` says whether token i is a label."""

    ids: list[int]
    learnt: list[bool]


class Encoder:
    """Turns rows into tokens with one tokenizer and one choice of what is learnt (``answer`` or ``all``)."""

    def __init__(self, tokenizer: Any, loss_on: str) -> None:
        if not tokenizer.is_fast:
            raise DataError("the tokenizer gives no character offsets; a tokenizer.json is needed to find the labels")
        if tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has no end token (eos_token); set one in its tokenizer_config.json")
        self._tokenizer, self._loss_on = tokenizer, loss_on
        self._end = end_marker(tokenizer) if tokenizer.chat_template else None

    def __call__(self, row: Any) -> Encoded:
        """The tokens of a row.

        Raises:
            BadRow: unknown shape, a template that refuses it, or nothing to learn.
        """
        shape = read_shape(row)
        encoded = self._chat(shape) if isinstance(shape, Chat) else self._plain(shape)
        if not any(encoded.learnt[1:]):
            raise BadRow("has nothing to learn: no assistant or completion token")
        return encoded

    def _plain(self, row: Plain) -> Encoded:
        text = row.prompt + row.completion
        coded = self._tokenizer(text, add_special_tokens=True, return_offsets_mapping=True)
        start = len(row.prompt) if self._loss_on == "answer" else 0
        return self._with_end(_mark(coded, [(start, len(text))]))

    def _chat(self, row: Chat) -> Encoded:
        if not self._tokenizer.chat_template:
            raise BadRow("is a conversation, but the tokenizer has no chat template; use prompt + completion rows")
        text = self._render(row, len(row.messages), prompt=False)
        spans = [self._span(row, index, text) for index, trained in enumerate(row.trained) if trained]
        if not spans:
            raise BadRow("has nothing to learn: no assistant message")
        if self._loss_on == "all":
            spans = [(0, len(text))]
        coded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        encoded = _mark(coded, spans)
        return self._with_end(encoded) if self._end is None and row.trained[-1] else encoded

    def _span(self, row: Chat, index: int, text: str) -> tuple[int, int]:
        """Where assistant turn ``index`` begins and ends in the rendered text, its end token included."""
        start = self._start(row, index, text)
        if self._end is not None:
            end = text.find(self._end, start)
            if end < 0 or self._end in str(row.messages[index]["content"]):
                raise BadRow(f"message {index + 1}: its end cannot be told by the end token {self._end!r}")
            return start, end + len(self._end)
        if index == len(row.messages) - 1:
            return start, len(text.rstrip())
        whole = self._render(row, index + 1, prompt=False)
        if not text.startswith(whole):
            raise BadRow("the chat template rewrites earlier turns and has no end token: the labels cannot be told")
        return start, len(whole.rstrip())

    def _start(self, row: Chat, index: int, text: str) -> int:
        """Where the answer begins: after the longest part of its prompt that the whole text shares."""
        prompt = self._render(row, index, prompt=True)
        if text.startswith(prompt):
            return len(prompt)
        # The prompt promises something the whole text lacks, such as an opened <think>.
        before = self._render(row, index, prompt=False)
        start = next(i for i, (a, b) in enumerate(zip(prompt, text + "\0", strict=False)) if a != b)
        content = str(row.messages[index]["content"]).strip()
        found = text.find(content, len(before)) if content else -1
        if not text.startswith(before) or start < len(before) or found < 0:
            raise BadRow("the chat template renders earlier turns differently later on: the labels cannot be told")
        return min(start, found)

    def _render(self, row: Chat, count: int, *, prompt: bool) -> str:
        import jinja2

        if count == 0 and not prompt:
            return ""
        try:
            rendered = self._tokenizer.apply_chat_template(
                list(row.messages[:count]), tools=row.tools, tokenize=False, add_generation_prompt=prompt
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError) as problem:
            raise BadRow(f"the chat template refuses it: {problem}") from None
        return str(rendered)

    def _with_end(self, encoded: Encoded) -> Encoded:
        end = self._tokenizer.eos_token_id
        if encoded.ids and encoded.ids[-1] == end:
            return Encoded(encoded.ids, [*encoded.learnt[:-1], True])
        return Encoded([*encoded.ids, end], [*encoded.learnt, True])


def end_marker(tokenizer: Any) -> str | None:
    """The special token a template puts after an assistant's content, or None when it puts none."""
    import jinja2

    try:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": SENTINEL}]
        text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except jinja2.TemplateError as problem:
        raise DataError(f"the tokenizer's chat template fails on a plain conversation: {problem}") from None
    if SENTINEL not in text:
        raise DataError("the tokenizer's chat template drops the assistant's content")
    tail = text.rpartition(SENTINEL)[2]
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    found = [(tail.find(token), token) for token in special if token in tail]
    return min(found)[1] if found else None


def _mark(coded: Any, spans: list[tuple[int, int]]) -> Encoded:
    """Token i is learnt when it lies wholly inside a span; a token across its edge belongs to the prompt."""
    learnt = [
        any(start <= first and last <= end and first < last for start, end in spans)
        for first, last in coded["offset_mapping"]
    ]
    return Encoded(list(coded["input_ids"]), learnt)
