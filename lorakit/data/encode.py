"""A row -> token ids and which of them are learnt.

Chat rows go through the tokenizer's own template. What is learnt is found by comparing renderings, so templates need
no generation markers: an assistant turn begins where the prompt for it ends, and ends with the first end token.
"""

import itertools
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
        start = len(row.prompt) if self._loss_on == "answer" else 0
        return self._with_end(self._tokens(text, [(start, len(text))], special=True))

    def _chat(self, row: Chat) -> Encoded:
        if not self._tokenizer.chat_template:
            raise BadRow("is a conversation, but the tokenizer has no chat template; use prompt + completion rows")
        text = self._render(row.messages, row.tools, prompt=False)
        spans = [self._span(row, index, text) for index, trained in enumerate(row.trained) if trained]
        if not spans:
            raise BadRow("has nothing to learn: no assistant message")
        if self._loss_on == "all":
            spans = [(0, len(text))]
        encoded = self._tokens(text, spans, special=False)
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
        whole = self._render(row.messages[: index + 1], row.tools, prompt=False)
        if not text.startswith(whole):
            raise BadRow("the chat template rewrites earlier turns and has no end token: the labels cannot be told")
        return start, len(whole.rstrip())

    def _start(self, row: Chat, index: int, text: str) -> int:
        """Where the answer begins: after its prompt, or where the template puts the content."""
        prompt = self._render(row.messages[:index], row.tools, prompt=True)
        if text.startswith(prompt):
            return len(prompt)
        # The prompt holds something the whole text lacks, such as an opened <think>: look where a mark comes out.
        marked = ({**row.messages[index], "content": SENTINEL}, *row.messages[index + 1 :])
        before, found, _ = self._render((*row.messages[:index], *marked), row.tools, prompt=False).partition(SENTINEL)
        if not found or not text.startswith(before):
            raise BadRow("the chat template renders earlier turns differently later on: the labels cannot be told")
        return len(before)

    def _render(self, messages: tuple[dict[str, Any], ...], tools: list[Any] | None, *, prompt: bool) -> str:
        import jinja2

        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError) as problem:
            raise BadRow(f"the chat template refuses it: {problem}") from None
        return str(rendered)

    def _tokens(self, text: str, spans: list[tuple[int, int]], *, special: bool) -> Encoded:
        """The tokens of a text; those inside a span are learnt.

        A prompt is tokenised alone when the model is asked, so no token may reach across the start of an answer:
        where one does, the text is tokenised in pieces.
        """
        coded = self._tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        places = coded["offset_mapping"]
        if any(first < start < last for start, _ in spans for first, last in places):
            edges = [0, *sorted({edge for span in spans for edge in span} - {0, len(text)}), len(text)]
            pieces = [
                (self._tokenizer(text[a:b], add_special_tokens=special and a == 0)["input_ids"], _inside(a, b, spans))
                for a, b in itertools.pairwise(edges)
            ]
            ids = [token for tokens, _ in pieces for token in tokens]
            return Encoded(ids, [learnt for tokens, learnt in pieces for _ in tokens])
        learnt = [first < last and _inside(first, last, spans) for first, last in places]
        return Encoded(list(coded["input_ids"]), learnt)

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


def _inside(first: int, last: int, spans: list[tuple[int, int]]) -> bool:
    return any(start <= first and last <= end for start, end in spans)
