"""Divide an answer, while its text comes, into thinking, content and tool calls.

Invariant: whatever pieces a text comes in, the parts joined are the same. No text is lost: what turns out to be no call
is content. Where its arguments begin in JSON, it is a call, also if they are cut.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal, final

from lorakit.inference.answer_form import DECODER, AnswerForm, AnswerPart, Kind, functions_of


@final
class AnswerParser:
    """The parts of one answer.

    prompt: its end decides whether the answer begins inside of a thought. tools: the request's; without them nothing is
    a call.
    """

    def __init__(self, form: AnswerForm, prompt: str, tools: Sequence[Any]) -> None:
        self._tools = tools
        self._names = {function["name"] for function in functions_of(tools)}
        self._calls = form.calls if tools else None
        opening, self._closing = (text.strip() for text in form.thought or ("", ""))
        self._first_marks: dict[str, Kind] = {opening: "thought"} if opening else {}
        if not self._closing or self._closing not in form.header:
            self._first_marks |= {form.header.strip(): "content"} if form.header.strip() else {}
        self._marks: dict[str, Kind] = dict.fromkeys(form.dropped, "content")
        if form.dropped:
            self._marks[opening] = "thought"
        if self._calls is not None:
            around = (self._calls.open.strip(), self._calls.close.strip())
            self._marks |= {text: "content" for text in around if text}
            self._marks |= {self._calls.start_mark: "call"} if self._calls.start_mark else {}
        self._state: Kind | Literal["arguments", "called"] = "thought" if form.is_opened_by(prompt) else "content"
        self._strips = self._state == "thought"  # whether a part begins here, before which white space is dropped
        self._has_begun = self._strips  # False before the first text, where a thought can begin
        self._waiting = ""  # text whose part is not certain yet
        self._searched = 0  # letters of it in which the end of a call is not
        self._arguments = ""  # so far, of a call that is emitted as it comes

    def add(self, text: str) -> list[AnswerPart]:
        """Return the parts that are certain after more text."""
        self._waiting += text
        parts = list[AnswerPart]()
        while self._pass_mark(parts):
            pass
        return parts

    def finish(self) -> list[AnswerPart]:
        """Return the rest, when no more text comes."""
        rest = self._waiting
        self._waiting = ""
        if self._state in ("call", "called") and self._calls is not None:
            try:
                return self._call_parts(rest)
            except ValueError:  # cut off, or none
                rest = self._calls.start_mark + rest
        kind: Kind = "thought" if self._state == "thought" else "content"
        return [AnswerPart(kind, rest)] if rest.strip() or (rest and kind == "content") else []

    def _pass_mark(self, parts: list[AnswerPart]) -> bool:
        """Emit the text before the next mark, and go to the part behind it. False: no mark has come in full."""
        if self._state not in ("content", "thought"):
            return self._pass_call(parts)
        if self._strips:
            self._waiting = self._waiting.lstrip()
        begun = self._waiting.lstrip()
        is_start = self._state == "content" and not self._has_begun
        if is_start and self._calls is not None and not self._calls.start_mark and begun.startswith("{"):
            self._state = "call"  # without a mark, such as Llama 3's
            return True
        marks = {self._closing: "content"} if self._state == "thought" else self._marks
        first = {} if self._has_begun or self._state == "thought" else self._first_marks
        positions = [(at, -len(mark), mark) for mark in marks if (at := self._waiting.find(mark)) >= 0]
        positions += [(len(self._waiting) - len(begun), -len(mark), mark) for mark in first if begun.startswith(mark)]
        if positions:
            at, _, mark = min(positions)
            self._emit(parts, self._waiting[:at].rstrip())
            self._waiting = self._waiting[at + len(mark) :]
            self._state = (marks | first)[mark]  # type: ignore[assignment]
            self._strips = True
            return True
        if any(mark.startswith(begun) for mark in first):
            return False
        stop = len(self._waiting) - max((num_begun(self._waiting, mark) for mark in marks), default=0)
        certain = self._waiting[:stop].rstrip()
        self._waiting = self._waiting[len(certain) :]
        self._emit(parts, certain)
        return False

    def _emit(self, parts: list[AnswerPart], text: str) -> None:
        if text:
            self._has_begun = True
            self._strips = False
            parts.append(AnswerPart("thought" if self._state == "thought" else "content", text))

    def _pass_call(self, parts: list[AnswerPart]) -> bool:
        """Emit a call, if its end has come, or its arguments as they come, and go to the part behind it."""
        assert self._calls is not None
        if self._state == "call" and (begun := self._calls.begin(self._waiting)) and begun[1] in self._names:
            parts.append(AnswerPart("call", name=begun[1]))
            self._state = "arguments"
            self._arguments = ""
            self._searched = 0
            self._waiting = self._waiting[begun.end() :]
        if self._state == "arguments":
            self._pass_arguments(parts)
        end = self._calls.end_mark or self._calls.start_mark
        if self._state == "arguments" or not end:  # an answer that is one call
            return False
        while (at := self._waiting.find(end, self._searched)) >= 0:
            try:
                parts += self._call_parts(self._waiting[:at])
            except ValueError:  # the end's text inside of an argument
                self._searched = at + 1
                continue
            self._waiting = self._waiting[at + len(self._calls.end_mark) :]
            self._searched = 0
            self._state = "content"
            self._strips = True
            self._has_begun = True
            return True
        self._searched = max(self._searched, len(self._waiting) - len(end) + 1)
        return False

    def _pass_arguments(self, parts: list[AnswerPart]) -> None:
        """Emit what has come of the arguments, up to their end."""
        num_sent = len(self._arguments)
        self._arguments += self._waiting
        stop = len(self._arguments)
        if "}" in self._waiting:
            with suppress(ValueError):
                stop = DECODER.raw_decode(self._arguments)[1]
                self._state = "called"
        parts += [AnswerPart("call", self._arguments[num_sent:stop])] if stop > num_sent else []
        self._waiting = self._arguments[stop:]

    def _call_parts(self, text: str) -> list[AnswerPart]:
        """Return the calls of a text. Raises ValueError: it is none, or without a mark a call of no tool."""
        assert self._calls is not None
        if self._state == "called":
            return []
        calls = self._calls.read(text, self._tools)
        if not calls or (not self._calls.start_mark and any(call.name not in self._names for call in calls)):
            raise ValueError("no call of a tool")
        heads = [AnswerPart("call", name=call.name, id=call.id) for call in calls]
        texts = [AnswerPart("call", json.dumps(call.arguments, ensure_ascii=False)) for call in calls]
        return [part for pair in zip(heads, texts, strict=True) for part in pair]


def num_begun(text: str, mark: str) -> int:
    """Return how many letters at the end of a text may begin a mark."""
    longest = min(len(text), len(mark) - 1)
    return next((number for number in range(longest, 0, -1) if text.endswith(mark[:number])), 0)
