"""Bytes and places of tokens, for four kinds of tokenizers: joined, the bytes are the text, and places are in it."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from lorakit.base._internals import backend_of
from lorakit.inference.prompts import TokenTexts, encode
from lorakit.serving.answer import Detokenizer
from tests.helpers.tokenizers import fast, sentencepiece, single_bytes

CHARACTERS = "ab zé\u4e2d\U0001f917\u0e01 .\n"


@pytest.fixture(scope="module", params=["built-in", "sentencepiece", "bytes"])
def kind(request: pytest.FixtureRequest, tokenizer: Any) -> Any:
    made = {"built-in": lambda: tokenizer, "sentencepiece": sentencepiece, "bytes": single_bytes}
    return made[request.param]()


class Shouting(PreTrainedTokenizerFast):
    """A class whose call does more than its backend."""

    def _encode_plus(self, text: str, **options: Any) -> Any:
        return super()._encode_plus(text.upper(), **options)


@given(text=st.text(f"{CHARACTERS}</s>"), special=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_text_has_the_tokens_of_a_call(kind: Any, text: str, special: bool) -> None:
    shouting = Shouting(tokenizer_object=kind.backend_tokenizer, bos_token="<s>", eos_token="</s>")
    splitting = copy.deepcopy(kind)
    splitting.split_special_tokens = True
    for one in (kind, shouting, splitting):
        assert encode(one, text, add_special_tokens=special) == one(text, add_special_tokens=special)["input_ids"]
    assert (backend_of(kind) is None, backend_of(shouting), backend_of(splitting)) == (False, None, None)


@pytest.mark.parametrize(
    "earlier",
    [
        {"split_special_tokens": True},
        {"truncation": True, "max_length": 2},
        {"padding": "max_length", "max_length": 99},
    ],
)
def test_settings_of_an_earlier_call_do_not_stay(kind: Any, earlier: dict[str, Any]) -> None:
    text = "ab ab</s>ab"
    one = copy.deepcopy(kind)
    one.pad_token = one.eos_token
    one(text, **earlier)
    assert backend_of(one) is None
    assert encode(one, text) == kind(text, add_special_tokens=False)["input_ids"]
    assert backend_of(one) is not None  # a call without them takes them back


@given(st.text(CHARACTERS, min_size=1, max_size=20))
@settings(max_examples=120, deadline=None)
def test_bytes_join_to_the_text_after_a_prompt_and_places_are_those_of_the_characters(kind: Any, text: str) -> None:
    texts = TokenTexts(kind)
    prompt = kind("a", add_special_tokens=False)["input_ids"]
    ids = kind(text, add_special_tokens=False)["input_ids"]
    detokenizer = Detokenizer(kind, prompt=[*prompt, kind.bos_token_id])
    content, pieces = b"", []
    for token in ids:
        assert detokenizer.num_characters == len(content.decode(errors="ignore"))
        pieces.append(detokenizer.add(token)[0])
        content += texts.bytes(token)
    shown = "".join(pieces) + detokenizer.finish()[0]
    assert shown == content.decode()
    assert shown in (text, f" {text}")  # sentencepiece puts a space before
    assert kind.decode([*prompt, *ids]) == f"a{shown}"


@given(st.text(CHARACTERS, min_size=1, max_size=20))
@settings(max_examples=60, deadline=None)
def test_a_text_that_begins_with_the_answer_is_the_decoded_one(kind: Any, text: str) -> None:
    ids = kind(text, add_special_tokens=False)["input_ids"]
    detokenizer = Detokenizer(kind, prompt=[kind.bos_token_id])
    assert "".join([*(detokenizer.add(token)[0] for token in ids), detokenizer.finish()[0]]) == kind.decode(ids) == text


def test_a_wordpiece_token_has_the_space_that_stands_before_it() -> None:
    vocabulary = {"[UNK]": 0, "a": 1, "mira": 2, "##lamps": 3}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    texts = TokenTexts(fast(made))
    assert [texts.text(token) for token in (2, 3)] == [" mira", "lamps"]


def test_each_byte_token_has_its_own_byte() -> None:
    for made in (sentencepiece(), single_bytes()):
        texts = TokenTexts(made)
        own = [texts.bytes(token) for token in range(256)]
        assert len(set(own)) == 256
        assert all(len(one) == 1 for one in own)
