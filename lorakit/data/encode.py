"""A row -> token ids and which of them are learnt.

Chat rows go through the tokenizer's own template. What is learnt is found by comparing renderings, so templates need no
generation markers. A row whose labels cannot be told, or that the template does not show whole, is a BadRow.
"""

import itertools
import json
from dataclasses import dataclass
from typing import Any

from lorakit.data.row_formats import Chat, Plain, parse_row_format
from lorakit.data.rows import BadRow
from lorakit.errors import DataError

SENTINEL = "\u241elorakit\u241e"


@dataclass(frozen=True)
class Encoded:
    """Token ids of one row; ``learnt[i]`` says whether token i is a label."""

    ids: list[int]
    label_mask: list[bool]


@dataclass(frozen=True)
class Turn:
    """An assistant's turn in the rendered text: from the end of its prompt to the end of its end token.

    ``end`` is where that token begins, or None when the template writes none.
    """

    start: int
    stop: int
    end: int | None


class Encoder:
    """Turns rows into tokens with one tokenizer and one choice of what is learnt (``answer`` or ``all``)."""

    def __init__(self, tokenizer: Any, loss_on: str) -> None:
        if not tokenizer.is_fast:
            raise DataError("the tokenizer gives no character offsets; a tokenizer.json is needed to find the labels")
        if tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has no end token (eos_token); set one in its tokenizer_config.json")
        self._tokenizer, self._loss_on = tokenizer, loss_on
        self._added = added_tokens(tokenizer)

    def __call__(self, row: Any) -> Encoded:
        """The tokens of a row.

        Raises:
            BadRow: unknown shape, a template that refuses or hides part of it, or nothing to learn.
        """
        shape = parse_row_format(row)
        encoded = self._chat(shape) if isinstance(shape, Chat) else self._plain(shape)
        if not any(encoded.label_mask[1:]):
            raise BadRow("has nothing to learn: no assistant or completion token")
        return encoded

    def _plain(self, row: Plain) -> Encoded:
        text = row.prompt + row.completion
        start = len(row.prompt) if self._loss_on == "answer" else 0
        return self._with_end(self._tokens(text, [(start, len(text))], [], special=True))

    def _chat(self, row: Chat) -> Encoded:
        if not self._tokenizer.chat_template:
            raise BadRow("is a conversation, but the tokenizer has no chat template; use prompt + completion rows")
        if not any(row.trained):
            raise BadRow("has nothing to learn: no assistant message")
        text = self._render(row.messages, row.tools)
        self._check_shown(row, text)
        turns = [self._turn(row, index, text) for index, trained in enumerate(row.trained) if trained]
        open_end = row.trained[-1] and turns[-1].end is None
        if open_end:
            text = text[: turns[-1].stop]  # what the template writes after the answer is for the next turn
        spans = [(0, len(text))] if self._loss_on == "all" else [(turn.start, turn.stop) for turn in turns]
        encoded = self._tokens(text, spans, [turn.end for turn in turns if turn.end is not None], special=False)
        return self._with_end(encoded) if open_end else encoded

    def _turn(self, row: Chat, index: int, text: str) -> Turn:
        """Where assistant turn ``index`` lies in the rendered text."""
        start = self._start(row, index, text)
        whole = self._render(row.messages[: index + 1], row.tools)
        if text.startswith(whole):
            stop, token = len(whole.rstrip()), self._token_before(whole)
            content = stop - len(token)
        else:
            # The template renders this turn differently once others follow: see what comes after its content.
            after = self._around(row, index, text)[1]
            token = self._token_after(after)
            if token != self._token_before(whole) and not (index and self._ends_with(row, index - 1, text, token)):
                token = ""  # the header of the next turn, not the end of this one
            content = len(text) - len(after)
            stop = content + (len(after) - len(after.lstrip()) + len(token) if token else 0)
        said = str(row.messages[index]["content"]).rpartition("</think>")[2].strip()
        if said not in text[start:content]:
            raise BadRow(f"message {index + 1}: the chat template does not show it after its prompt")
        if token and token in json.dumps(row.messages[index], ensure_ascii=False, default=str):
            raise BadRow(f"message {index + 1}: holds the end token {token!r}, so its end cannot be told")
        return Turn(start, stop, stop - len(token) if token else None)

    def _start(self, row: Chat, index: int, text: str) -> int:
        """Where the answer begins: right after the prompt the model is asked with."""
        prompt = self._render(row.messages[:index], row.tools, prompt=True) if index else SENTINEL
        if text.startswith(prompt):
            return len(prompt)
        if index and index == len(row.messages) - 1:
            raise BadRow(
                f"message {index + 1}: the chat template asks for it with a prompt ending in {prompt[-40:]!r},"
                " but shows it after something else, so the model would learn to answer what it is never asked;"
                " use prompt + completion rows, or another chat template"
            )
        return len(self._around(row, index, text)[0])

    def _around(self, row: Chat, index: int, text: str) -> tuple[str, str]:
        """What the template writes before and after the content of a message, found with a mark in its place."""
        marked = {"role": row.messages[index]["role"], "content": SENTINEL}
        messages = (*row.messages[:index], marked, *row.messages[index + 1 :])
        before, found, after = self._render(messages, row.tools).partition(SENTINEL)
        if not found or not text.endswith(after):
            raise BadRow(f"message {index + 1}: the chat template changes with its content: the labels cannot be told")
        return (before if text.startswith(before) else text), after

    def _ends_with(self, row: Chat, index: int, text: str, token: str) -> bool:
        return self._token_after(self._around(row, index, text)[1]) == token

    def _token_before(self, text: str) -> str:
        """The special token a text ends with, white space aside."""
        return max((token for token in self._added if text.rstrip().endswith(token)), key=len, default="")

    def _token_after(self, text: str) -> str:
        """The special token a text begins with, white space aside."""
        return max((token for token in self._added if text.lstrip().startswith(token)), key=len, default="")

    def _check_shown(self, row: Chat, text: str) -> None:
        """Every message, tool and tool call must be in the text; what a template leaves out is not taught."""
        for number, message in enumerate(row.messages, 1):
            said = str(message["content"]).strip()
            quoted = (json.dumps(said, ensure_ascii=ascii_only)[1:-1] for ascii_only in (True, False))
            if not any(form in text for form in (said, said.rpartition("</think>")[2].strip(), *quoted)):
                raise BadRow(f"message {number} ({message['role']}): the chat template leaves it out")
            for call in message.get("tool_calls") or []:
                function = call.get("function", call) if isinstance(call, dict) else {}
                if str(function.get("name", SENTINEL)) not in text:
                    raise BadRow(f"message {number}: the chat template leaves out its tool call")
        if row.tools and self._render(row.messages, None) == text:
            raise BadRow("tools: the chat template leaves them out")

    def _render(self, messages: tuple[dict[str, Any], ...], tools: list[Any] | None, *, prompt: bool = False) -> str:
        import jinja2

        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as problem:
            raise BadRow(f"the chat template refuses it: {problem}") from None
        return str(rendered)

    def _tokens(self, text: str, spans: list[tuple[int, int]], ends: list[int], *, special: bool) -> Encoded:
        """The tokens of a text; those inside a span are learnt, and those that begin an end token at ``ends``.

        A prompt is tokenised alone when the model is asked, so no token may reach across the start of an answer:
        where one does, the text is tokenised in pieces.
        """
        coded = self._tokenizer(
            text, add_special_tokens=special, return_offsets_mapping=True, return_special_tokens_mask=True
        )
        places = _tiled(coded["offset_mapping"])
        markers = self._tokenizer.added_tokens_decoder  # may take the white space after them; they belong to the prompt
        plain = [place for place, token in zip(places, coded["input_ids"], strict=True) if token not in markers]
        if any(first < start < last for start, _ in spans for first, last in plain):
            return self._in_pieces(text, spans, special=special)
        label_mask = [
            not added and (_inside(first, last, spans) or any(first <= end < last for end in ends))
            for (first, last), added in zip(places, coded["special_tokens_mask"], strict=True)
        ]
        return Encoded(list(coded["input_ids"]), label_mask)

    def _in_pieces(self, text: str, spans: list[tuple[int, int]], *, special: bool) -> Encoded:
        edges = sorted({0, len(text)} | {edge for span in spans for edge in span})
        ids: list[int] = []
        label_mask: list[bool] = []
        for first, last in itertools.pairwise(edges):
            tokens = self._later_piece(text[first:last]) if first else self._first_piece(text[:last], special)
            ids += tokens
            label_mask += [_inside(first, last, spans)] * len(tokens)
        if self._tokenizer.decode(ids, skip_special_tokens=special).strip() != text.strip():
            raise BadRow("the tokenizer cannot tell the prompt from the answer: end the prompt before a space")
        return Encoded(ids, label_mask)

    def _first_piece(self, text: str, special: bool) -> list[int]:
        ids = list(self._tokenizer(text, add_special_tokens=special)["input_ids"])
        return ids[:-1] if special and ids[-1:] == [self._tokenizer.eos_token_id] else ids

    def _later_piece(self, text: str) -> list[int]:
        """The tokens of a text in the middle: after a line break, where no tokenizer adds a space of its own."""
        mark = self._tokenizer("\n", add_special_tokens=False)["input_ids"]
        ids = self._tokenizer("\n" + text, add_special_tokens=False)["input_ids"]
        if ids[: len(mark)] == mark:
            return list(ids[len(mark) :])
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _with_end(self, encoded: Encoded) -> Encoded:
        end = self._tokenizer.eos_token_id
        if encoded.ids and encoded.ids[-1] == end:
            return Encoded(encoded.ids, [*encoded.label_mask[:-1], True])
        return Encoded([*encoded.ids, end], [*encoded.label_mask, True])


def added_tokens(tokenizer: Any) -> set[str]:
    """The tokens a template can end a turn with."""
    return {token.content for token in tokenizer.added_tokens_decoder.values()} | {tokenizer.eos_token}


def end_marker(tokenizer: Any) -> str | None:
    """The token a template puts after an assistant's last content, or None when it puts none."""
    import jinja2

    try:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": SENTINEL}]
        tail = str(tokenizer.apply_chat_template(turns, tokenize=False)).rpartition(SENTINEL)[2].lstrip()
    except jinja2.TemplateError as problem:
        raise DataError(f"the tokenizer's chat template fails on a plain conversation: {problem}") from None
    return max((token for token in added_tokens(tokenizer) if tail.startswith(token)), key=len, default=None)


def _tiled(places: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Offsets without gaps: some tokenizers trim the space a token stands for."""
    tiled, reached = [], 0
    for first, last in places:
        tiled.append((min(first, reached), last))
        reached = max(reached, last)
    return tiled


def _inside(first: int, last: int, spans: list[tuple[int, int]]) -> bool:
    return any(start <= first and last <= end and (first < last or first < end) for start, end in spans)
