"""Turn the tokens of one answer into text while they come.

Invariant: the pieces joined are the decoded answer. No piece ends inside a character, or with what may be the beginning
of a stop text.
"""

from collections.abc import Sequence
from typing import Any, Final, final

REPLACEMENT: Final = "�"
"""stands at the end of a text whose last character is not complete"""


@final
class Detokenizer:
    """The text of one answer. ``stop``: texts that end it."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._ids: list[int] = []
        self._text = ""
        self._given = 0
        """characters that were returned"""

    def add(self, token: int) -> tuple[str, bool]:
        """Return the text that is certain after one more token, and True if a stop text has come."""
        self._ids.append(token)
        # all of it, because a token's text may depend on those before it, such as a space of sentencepiece
        self._text = str(self._tokenizer.decode(self._ids, skip_special_tokens=True))
        matches = [
            index for stop in self._stop if (index := self._text.find(stop, max(0, self._given - len(stop)))) >= 0
        ]
        if matches:
            self._text = self._text[: min(matches)]
            return self._give(len(self._text)), True
        if self._text.endswith(REPLACEMENT):
            return "", False
        return self._give(len(self._text) - self._num_withheld()), False

    def finish(self) -> str:
        """Return the rest of the text, when no more tokens come."""
        return self._give(len(self._text))

    def _give(self, stop: int) -> str:
        piece = self._text[self._given : stop]
        self._given = max(self._given, stop)
        return piece

    def _num_withheld(self) -> int:
        """Return the length of the text's longest end that begins a stop text."""
        longest = max(map(len, self._stop), default=0)
        return next(
            (
                size
                for size in range(min(longest - 1, len(self._text)), 0, -1)
                if any(stop.startswith(self._text[-size:]) for stop in self._stop)
            ),
            0,
        )
