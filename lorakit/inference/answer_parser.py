"""Divide an answer, while its text comes, into thinking, content and tool calls.

Invariant: whatever pieces a text comes in, the parts joined are the same. No text is lost: what turns out to be no call
is content. Where its arguments have begun, it is a call, also if they are cut.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, Literal, final

from lorakit.data.row_formats import function_of
from lorakit.inference.answer_form import AnswerForm, AnswerPart, FramedArguments, JsonObject, Kind, num_begun

BETWEEN_CALLS: Final = " \t\r\n;,"  # where calls have no mark, as Llama 3's


@final
class AnswerParser:
    """The parts of one answer.

    prompt: its end decides whether the answer begins inside of a thought. tools: the request's; without them nothing is
    a call. parallel: False for one call at most. is_done: True once an answer goes on to a second call then.
    """

    def __init__(self, form: AnswerForm, prompt: str, tools: Sequence[Any], *, parallel: bool = True) -> None:
        self.is_done = False
        self._most_calls = math.inf if parallel else 1
        self._num_calls = 0
        self._tools = tools
        self._names = {function_of(tool)["name"] for tool in tools}
        self._calls = form.calls if tools else None
        opening, self._closing = (text.strip() for text in form.thought or ("", ""))
        self._first_marks: dict[str, Kind] = {opening: "thought"} if opening else {}
        if not self._closing or self._closing not in form.header:
            self._first_marks |= {form.header.strip(): "content"} if form.header.strip() else {}
        self._marks: dict[str, Kind] = dict.fromkeys(form.dropped, "content")
        if form.dropped:
            self._marks[opening] = "thought"
        if self._calls is not None:
            self._marks |= {text: "content" for text in (self._calls.open.strip(), self._calls.close.strip()) if text}
            self._marks |= {self._calls.start_mark: "call"} if self._calls.start_mark else {}
        self._state: Kind | Literal["arguments", "called"] = "thought" if form.is_opened_by(prompt) else "content"
        self._strips = self._state == "thought"  # whether a part begins here, before which white space is dropped
        self._has_begun = self._strips  # False before the first text, where a thought can begin
        self._waiting = ""  # text whose part is not certain yet
        self._searched = 0  # letters of it in which the end of a call is not
        self._arguments: JsonObject | FramedArguments = JsonObject()  # of a call that is emitted as it comes
        self._follows_call = False  # True directly behind a call without a mark, where the next one can begin

    def add(self, text: str) -> list[AnswerPart]:
        """Return the parts that are certain after more text."""
        self._waiting += text
        parts = list[AnswerPart]()
        while self._pass_mark(parts):
            pass
        return self._limited(parts)

    def finish(self) -> list[AnswerPart]:
        """Return the rest, when no more text comes."""
        rest = self._waiting
        if self._state == "arguments" and isinstance(self._arguments, FramedArguments):
            return []  # a number that is cut, or the beginning of a mark
        if self._state in ("call", "called") and self._calls is not None:
            try:
                return self._limited(self._call_parts(rest))
            except ValueError:  # cut off, or none
                rest = self._calls.start_mark + rest
        kind: Kind = "thought" if self._state == "thought" else "content"
        return self._limited([AnswerPart(kind, rest)] if rest.strip() or (rest and kind == "content") else [])

    def _limited(self, parts: list[AnswerPart]) -> list[AnswerPart]:
        """Return the parts up to a second call, where there may be one."""
        for index, part in enumerate(parts):
            self._num_calls += part.name is not None
            if self._num_calls > self._most_calls:
                self.is_done = True
                return parts[:index]
        return parts

    def _pass_mark(self, parts: list[AnswerPart]) -> bool:
        """Emit the text before the next mark, and go to the part behind it. False: no mark has come in full."""
        if self._state not in ("content", "thought"):
            return self._pass_call(parts)
        if self._strips:
            self._waiting = self._waiting.lstrip()
        begun = self._waiting.lstrip()
        if self._state == "content" and self._calls is not None and not self._calls.start_mark:
            next_call = self._waiting.lstrip(BETWEEN_CALLS) if self._follows_call else "" if self._has_begun else begun
            if next_call.startswith("{"):  # a call without a mark, such as Llama 3's
                self._waiting = next_call
                self._state = "call"
                return True
            if self._follows_call and not next_call:
                return False
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
            self._follows_call = False
            parts.append(AnswerPart("thought" if self._state == "thought" else "content", text))

    def _pass_call(self, parts: list[AnswerPart]) -> bool:
        """Emit a call, if its end has come, or its arguments as they come, and go to the part behind it."""
        assert self._calls is not None
        if self._state == "call" and (begun := self._calls.begin(self._waiting)) and begun[1] in self._names:
            parts.append(AnswerPart("call", name=begun[1]))
            self._state = "arguments"
            self._arguments = self._calls.reader(begun[1], self._tools)
            self._searched = 0
            self._waiting = self._waiting[begun.end() :]
        if self._state == "arguments":  # what has come of them, up to their end
            text, num_letters = self._arguments.add(self._waiting)
            parts += [AnswerPart("call", text)] if text else []
            self._waiting = self._waiting[num_letters:]
            self._state = "called" if self._arguments.is_over else "arguments"
        end = self._calls.end_mark or self._calls.start_mark
        if self._state == "called" and not end and self._waiting.strip():
            self._waiting = self._waiting.lstrip().removeprefix("}")
            self._state = "content"
            self._has_begun = self._follows_call = True
            return True
        if self._state == "arguments" or not end:
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

    def _call_parts(self, text: str) -> list[AnswerPart]:
        """Return the calls of a text. Raises ValueError: it is none, or without a mark a call of no tool."""
        assert self._calls is not None
        if self._state == "called":
            text = self._calls.behind(text)
            return [AnswerPart("content", text)] if text else []
        calls, rest = self._calls.read(text, self._tools)
        if not calls or (not self._calls.start_mark and any(call.name not in self._names for call in calls)):
            raise ValueError("no call of a tool")
        parts = [part for call in calls for part in (replace(call, text=""), AnswerPart("call", call.text))]
        return parts + ([AnswerPart("content", rest)] if rest else [])
