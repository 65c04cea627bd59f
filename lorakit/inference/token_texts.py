"""The text and the bytes of each token of an answer, as it has them after other tokens, and where it begins."""

import codecs
import functools
import re
from typing import Any, Final, final

REPLACEMENT: Final = "\ufffd"  # stands for bytes that are no character
FALLBACK: Final = re.compile("<0x([0-9A-F]{2})>")  # sentencepiece's token of one byte
VISIBLE: Final = [*range(33, 127), *range(161, 173), *range(174, 256)]
HIDDEN: Final = [byte for byte in range(256) if byte not in VISIBLE]
BYTES: Final = {chr(byte): byte for byte in VISIBLE} | {chr(256 + number): byte for number, byte in enumerate(HIDDEN)}
"""character of a byte-level token -> the byte for which it stands, as GPT-2's tokenizer has them"""


@final
class TokenTexts:
    """The texts of one tokenizer's tokens.

    Some tokenizers drop the first space of a text, so a token is decoded after another one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self.text = functools.cache(self._text)
        self.bytes = functools.cache(self._bytes)

    def first_text(self, token: int) -> str:
        """Return a token's text at the beginning of a text."""
        return str(self._tokenizer.decode([token]))

    def shown_bytes(self, token: int) -> bytes:
        """Return what a token adds to an answer, in which special tokens are not shown."""
        return b"" if token in self._special else self.bytes(token)

    def _text(self, token: int) -> str:
        if self._before is None or token in self._special:
            return self.first_text(token)
        before = self._tokenizer.decode([self._before])
        return str(self._tokenizer.decode([self._before, token])).removeprefix(before)

    def _bytes(self, token: int) -> bytes:
        text = self.text(token)
        if REPLACEMENT not in text:
            return text.encode()
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        if match := FALLBACK.fullmatch(piece):
            return bytes([int(match[1], 16)])
        if all(character in BYTES for character in piece):
            return bytes(BYTES[character] for character in piece)
        return text.encode()

    @functools.cached_property
    def _before(self) -> int | None:
        """Return a token of plain text, after which others are decoded; None: there is none."""
        ids = [one for one in self._tokenizer("a", add_special_tokens=False)["input_ids"] if one not in self._special]
        is_plain = bool(ids) and str(self._tokenizer.decode(ids[-1:])).isascii()
        return ids[-1] if is_plain else None


@final
class TextOffsets:
    """Where the tokens of one answer begin in its text."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0
        self._has_begun = False

    def add(self, token: int) -> int:
        """Return where the next token begins, in characters; inside of one: where that character does."""
        start = self._num_characters
        if content := self._texts.shown_bytes(token):
            text = self._decoder.decode(content)
            if not self._has_begun and text:  # without a space that is dropped there
                text = self._texts.first_text(token)
            self._num_characters += len(text)
            self._has_begun = True
        return start
