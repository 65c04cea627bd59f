"""Bytes and places of tokens, for four kinds of tokenizers: joined, the bytes are the text, and places are in it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lorakit.inference.token_texts import TextOffsets, TokenTexts

CHARACTERS = "ab zé\u4e2d\U0001f917\u0e01 .\n"


def fast(made: Tokenizer) -> Any:
    made.add_special_tokens([AddedToken("<s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")


def sentencepiece() -> Any:
    """As of Llama 2: the decoder drops the first space, and characters that are no token are bytes."""
    words = ["\u2581", "a", "b", "\u2581a", "\u2581b", "\u2581\u2581", "<unk>"]
    vocabulary = {token: number for number, token in enumerate([*(f"<0x{one:02X}>" for one in range(256)), *words])}
    merges = [("\u2581", "a"), ("\u2581", "b"), ("\u2581", "\u2581")]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return fast(made)


def single_bytes() -> Any:
    """Byte-level without a merge: every character but ASCII is cut."""
    vocabulary = {token: number for number, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return fast(made)


@pytest.fixture(scope="module", params=["built-in", "sentencepiece", "bytes"])
def kind(request: pytest.FixtureRequest, tokenizer: Any) -> Any:
    made = {"built-in": lambda: tokenizer, "sentencepiece": sentencepiece, "bytes": single_bytes}
    return made[request.param]()


@given(st.text(CHARACTERS, min_size=1, max_size=20))
@settings(max_examples=120, deadline=None)
def test_bytes_join_to_the_text_and_places_are_those_of_the_characters(kind: Any, text: str) -> None:
    texts = TokenTexts(kind)
    ids = [kind.bos_token_id, *kind(text, add_special_tokens=False)["input_ids"]]
    joined = b"".join(texts.shown_bytes(token) for token in ids).decode()
    offsets = TextOffsets(texts)
    places = [offsets.add(token) for token in ids]

    shown = kind.decode(ids, skip_special_tokens=True)
    assert joined in (text, f" {text}")  # sentencepiece puts a space before
    assert shown == text
    content = text.encode()
    dropped = len(joined) - len(text)
    num_bytes = 0
    for place, token in zip(places, ids, strict=True):
        before = content[: max(0, num_bytes - dropped)].decode(errors="ignore")
        assert place == len(before)
        num_bytes += len(texts.shown_bytes(token))


def test_a_wordpiece_token_has_the_space_that_stands_before_it() -> None:
    vocabulary = {"[UNK]": 0, "a": 1, "mira": 2, "##lamps": 3}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    texts = TokenTexts(fast(made))
    assert [texts.text(token) for token in (2, 3)] == [" mira", "lamps"]
    assert texts.first_text(2) == "mira"


def test_each_byte_token_has_its_own_byte() -> None:
    for made in (sentencepiece(), single_bytes()):
        texts = TokenTexts(made)
        own = [texts.bytes(token) for token in range(256)]
        assert len(set(own)) == 256
        assert all(len(one) == 1 for one in own)
