"""Turn the tokens of one answer into text while they come.

Invariant: the pieces joined are the decoded answer. No piece ends inside a character, or with what may be the beginning
of a stop text. The work of a token does not grow with the answer.
"""

from collections.abc import Sequence
from typing import Any, Final, final

REPLACEMENT: Final = "\ufffd"
"""stands at the end of a text whose last character is not complete"""
MAX_PENDING_TOKENS: Final = 8
"""that may wait for the rest of a character; UTF-8 has 4 bytes at most, so after more of them it is broken"""


@final
class Detokenizer:
    """The text of one answer. ``stop``: texts that end it.

    Not `tokenizers.decoders.DecodeStream`, which works on the same window: it raises an error at bytes that are no
    UTF-8, never returns the end of an answer that is cut inside a character, and needs a fast tokenizer.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._stops = [_StopText(text) for text in stop]
        self._ids: list[int] = []
        """the last tokens whose text was complete, and those after them, whose text may not be"""
        self._num_complete = 0
        """tokens of ``_ids`` whose text was complete"""
        self._complete = ""
        """their text, when they are decoded alone"""
        self._withheld = ""
        """text that may begin a stop text"""

    def add(self, token: int) -> tuple[str, bool]:
        """Return the text that is certain after one more token, and True if a stop text has come."""
        if token in self._special:
            return "", False
        self._ids.append(token)
        text = self._decode(self._ids)
        is_broken = len(self._ids) - self._num_complete > MAX_PENDING_TOKENS
        if not is_broken and (text.endswith(REPLACEMENT) or len(text) <= len(self._complete)):
            return "", False
        new = text[len(self._complete) :]
        # the new tokens stay, because a token's text depends on those before it: sentencepiece's first has no space
        self._ids = self._ids[self._num_complete :]
        self._num_complete = len(self._ids)
        self._complete = self._decode(self._ids)
        return self._until_stop(new)

    def finish(self) -> str:
        """Return the rest of the text, when no more tokens come."""
        new = self._decode(self._ids)[len(self._complete) :] if self._ids else ""
        text, is_stopped = self._until_stop(new)
        return text if is_stopped else text + self._withheld

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _until_stop(self, new: str) -> tuple[str, bool]:
        """Return the text that is certain after ``new``, and True if a stop text is complete."""
        text = self._withheld + new
        if not self._stops:
            return text, False
        for number, character in enumerate(new, len(self._withheld) + 1):
            if matches := [len(stop.text) for stop in self._stops if stop.add(character)]:
                return text[: number - max(matches)], True
        num_certain = len(text) - max(stop.num_matched for stop in self._stops)
        self._withheld = text[num_certain:]
        return text[:num_certain], False


@final
class _StopText:
    """A stop text, and how many of its characters the answer ends with.

    Source: Knuth, Morris, Pratt 1977. The table of borders is built as far as the answer has come in the text, so a
    long stop text costs nothing before it begins.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._borders = [0, 0]
        """n -> characters of the longest text that both begins and ends the first n characters"""

    def add(self, character: str) -> bool:
        """Return True if the answer ends with the text after one more character."""
        while self.num_matched and self.text[self.num_matched] != character:
            self.num_matched = self._borders[self.num_matched]
        if self.text[self.num_matched] == character:
            self.num_matched += 1
        if self.num_matched == len(self._borders):
            self._borders.append(self._next_border())
        return self.num_matched == len(self.text)

    def _next_border(self) -> int:
        last = self.text[len(self._borders) - 1]
        border = self._borders[-1]
        while border and self.text[border] != last:
            border = self._borders[border]
        return border + 1 if self.text[border] == last else 0
