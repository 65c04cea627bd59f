"""Divide an answer of gpt-oss, which is messages in OpenAI's Harmony form, each with a channel and perhaps a recipient.

<|channel|>analysis<|message|>THOUGHT<|end|><|start|>assistant<|channel|>final<|message|>CONTENT<|return|>
<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>
"""

import json
import re
from typing import Final, final

from lorakit.inference.answer_form import HARMONY_MARKS, AnswerPart, FunctionCall

MESSAGE: Final = "<|message|>"
ENDS: Final = re.compile(r"<\|(?:end|call|return|start)\|>")
RECIPIENT: Final = re.compile(r"to=(?:functions\.)?([\w.-]+)")


@final
class HarmonyParser:
    """The parts of one answer. prompt: ends with the start of a message, or inside of one."""

    def __init__(self, prompt: str) -> None:
        # after `<|start|>assistant` comes the rest of a header; of another prompt, the text of its last message
        self._header: str | None = prompt.rpartition("<|start|>")[2].rpartition(MESSAGE)[0] or None
        self._waiting = ""
        self._arguments = ""

    def add(self, text: str) -> list[AnswerPart]:
        """Return the parts that are certain after more text."""
        self._waiting += text
        parts = list[AnswerPart]()
        while True:
            if self._header is None:
                header, mark, rest = self._waiting.partition(MESSAGE)
                if not mark:
                    return parts
                self._header = header
                self._waiting = rest
            end = ENDS.search(self._waiting)
            text = self._waiting[: end.start()] if end else self._certain()
            self._emit(parts, text)
            if end is None:
                return parts
            self._waiting = self._waiting[end.end() - len(text) :]
            self._end_message(parts)

    def finish(self) -> list[AnswerPart]:
        """Return the rest, when no more text comes."""
        parts = self.add("")
        if self._header is None:  # a header that was cut off, or an answer in no such form
            is_header = any(mark in self._waiting for mark in HARMONY_MARKS)
            return parts if is_header or not self._waiting else [*parts, AnswerPart("content", self._waiting)]
        self._emit(parts, self._waiting)
        self._end_message(parts)
        return parts

    def _certain(self) -> str:
        """Return the waiting text without what may begin a mark at its end."""
        at = self._waiting.rfind("<")
        tail = self._waiting[at:] if at >= 0 else ""
        is_begun = bool(tail) and any(mark.startswith(tail) for mark in HARMONY_MARKS)
        return self._waiting[:at] if is_begun else self._waiting

    def _emit(self, parts: list[AnswerPart], text: str) -> None:
        self._waiting = self._waiting[len(text) :]
        if not text:
            return
        header = str(self._header)
        if RECIPIENT.search(header):
            self._arguments += text
        else:
            parts.append(AnswerPart("thought" if "analysis" in header else "content", text))

    def _end_message(self, parts: list[AnswerPart]) -> None:
        recipient = RECIPIENT.search(str(self._header))
        arguments = self._arguments
        self._header = None
        self._arguments = ""
        if recipient is None:
            return
        try:
            value = json.loads(arguments)
        except ValueError:
            value = None
        if isinstance(value, dict):
            parts.append(AnswerPart("call", call=FunctionCall(recipient[1], value)))
        elif arguments:  # cut off, or none
            parts.append(AnswerPart("content", arguments))
