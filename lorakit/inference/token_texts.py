"""The text and the bytes of each token of an answer, as it has them after other tokens."""

import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any, Final, final

from lorakit.base._internals import backend_of

REPLACEMENT: Final = "\ufffd"  # stands for bytes that are no character
FALLBACK: Final = re.compile("<0x([0-9A-F]{2})>")  # sentencepiece's token of one byte
VISIBLE: Final = [*range(33, 127), *range(161, 173), *range(174, 256)]
HIDDEN: Final = [byte for byte in range(256) if byte not in VISIBLE]
BYTES: Final = {chr(byte): byte for byte in VISIBLE} | {chr(256 + number): byte for number, byte in enumerate(HIDDEN)}
"""character of a byte-level token -> the byte for which it stands, as GPT-2's tokenizer has them"""
NUM_BEFORE: Final = 4  # tokens, of which one has more than a part of a character


def encode(tokenizer: Any, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Return the token ids of a text, as a call of its tokenizer does.

    Where it can, without the offsets that a call computes: they take half of the time, and freeing them keeps the other
    threads of Python waiting, for 20 ms after a text of 1 MB.
    """
    backend = backend_of(tokenizer)
    if backend is None:
        return list(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])
    return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def tokens_before(tokenizer: Any, prompt: Sequence[int]) -> list[int]:
    """Return the last tokens of a prompt, after which the answer is decoded; none if the text begins with the answer.

    Alone, an answer would lose the space before its first word with sentencepiece. Special tokens are no text.
    """
    special = frozenset(tokenizer.all_special_ids)
    ids = list(itertools.islice((token for token in reversed(prompt) if token not in special), NUM_BEFORE))[::-1]
    return [] if str(tokenizer.decode(ids, skip_special_tokens=False)).endswith(REPLACEMENT) else ids


@final
class TokenTexts:
    """The texts of tokens, decoded after another one, because some tokenizers drop the first space of a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self.text = functools.cache(self._text)
        self.bytes = functools.cache(self._bytes)

    def _text(self, token: int) -> str:
        if self._before is None or token in self._special:
            return str(self._tokenizer.decode([token]))
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
