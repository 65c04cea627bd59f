"""The text of an answer comes in pieces: none is wrong, and a token's work does not grow with the answer."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from lorakit.decoding.generation import LENGTH, STOP, Generation
from lorakit.decoding.sampling import SamplingSettings, Token
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.serving.answer import ChoiceStream, Detokenizer

WORDS = ["\u2581", "\u2581Mira", "\u2581ordered", "lamps", "\u2581\u2581", "\u00e9", "\u2581."]
BYTES = [f"<0x{number:02X}>" for number in range(256)]


@pytest.fixture(scope="module")
def sentencepiece() -> Any:
    """A tokenizer as of Llama 2: words with a space before them, and bytes of characters that are no token."""
    vocabulary = {token: number for number, token in enumerate([*BYTES, *WORDS, "<unk>"])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    made.add_special_tokens([AddedToken("<s>", special=True)])
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")


def answer(tokenizer: Any, ids: Sequence[int], stop: Sequence[str] = ()) -> tuple[list[str], bool]:
    """Return the pieces of an answer, and True if a stop text ended it."""
    detokenizer = Detokenizer(tokenizer, stop)
    pieces = []
    for token in ids:
        piece, is_stopped = detokenizer.add(token)
        pieces.append(piece)
        if is_stopped:
            return pieces, True
    piece, is_stopped = detokenizer.finish()
    return [*pieces, piece], is_stopped


@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=3), max_size=2))
@settings(max_examples=150, deadline=None)
def test_pieces_join_to_the_answer_up_to_the_stop_text_that_ends_first(
    tokenizer: Any, text: str, stop: list[str]
) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    full = tokenizer.decode(ids, skip_special_tokens=True)

    pieces, is_stopped = answer(tokenizer, ids, stop)

    matches = [(start + len(one), start) for one in stop if (start := full.find(one)) >= 0]
    assert "".join(pieces) == (full[: min(matches)[1]] if matches else full)
    assert is_stopped == bool(matches)
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in full


@given(st.lists(st.sampled_from([*WORDS, "<s>", *"\u4e2d\U0001f917z"]), max_size=20))
@settings(max_examples=150, deadline=None)
def test_spaces_bytes_and_special_tokens_of_sentencepiece_are_those_of_the_full_answer(
    sentencepiece: Any, parts: list[str]
) -> None:
    ids = []
    for part in parts:
        names = [part] if part in (*WORDS, "<s>") else [BYTES[number] for number in part.encode()]
        ids += sentencepiece.convert_tokens_to_ids(names)

    pieces, _ = answer(sentencepiece, ids)

    assert "".join(pieces) == sentencepiece.decode(ids, skip_special_tokens=True)
    assert all("\ufffd" not in piece for piece in pieces)


def test_bytes_that_are_no_text_hold_nothing_back_for_ever(sentencepiece: Any) -> None:
    ids = [0xFF] * 40 + sentencepiece.convert_tokens_to_ids(["\u2581Mira"])
    pieces, _ = answer(sentencepiece, ids)
    assert "".join(pieces) == sentencepiece.decode(ids)
    assert sum(map(bool, pieces)) > 2


def test_an_answer_that_ends_in_the_middle_of_a_stop_texts_character_has_stopped(model: AdaptedModel) -> None:
    ids = [
        *model.tokenizer("lamps", add_special_tokens=False)["input_ids"],
        *model.tokenizer("\U0001f917")["input_ids"],
    ]
    for stop, reason in (("\ufffd", STOP), ("s\ufffd", STOP), ("x\ufffd", LENGTH)):
        settings = SamplingSettings(stop=(stop,))
        choice = ChoiceStream([], None, model.codec(None), settings)
        choice.generation = Generation(None, [], settings)
        pieces = [choice.add(Token(number)) for number in ids[:-1]]
        choice.generation.finish(LENGTH)

        last = choice.add(None)

        text = "".join(part.text for delta in [*pieces, last] for part in delta.parts)
        assert (last.reason, choice.reason) == (reason, reason)
        assert text == {"\ufffd": "lamps", "s\ufffd": "lamp"}.get(stop, "lamps\ufffd")


class _Counting:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.all_special_ids = tokenizer.all_special_ids
        self.num_decoded = 0

    def decode(self, ids: list[int], **options: Any) -> Any:
        self.num_decoded += len(ids)
        return self._tokenizer.decode(ids, **options)


def test_the_decoded_tokens_of_an_answer_grow_as_its_length(tokenizer: Any) -> None:
    numbers = []
    for length in (500, 2000):
        counting = _Counting(tokenizer)
        text, _ = answer(counting, [5 + number * 7 % 3000 for number in range(length)], ["never"])
        assert "".join(text)
        numbers.append(counting.num_decoded)
    assert numbers[1] / numbers[0] < 4.5
    assert numbers[1] < 2000 * 8


def test_long_stop_texts_that_almost_come_cost_no_more_than_the_answer(tokenizer: Any) -> None:
    long = "M" * 400_000 + "x"
    ids = tokenizer("M" * 3000, add_special_tokens=False)["input_ids"]
    full = tokenizer.decode(ids, skip_special_tokens=True)
    pieces, is_stopped = answer(tokenizer, ids, [long] * 16)  # which compared every end with every stop text before
    assert (not is_stopped, "".join(pieces)) == (True, full)
    assert pieces[-1] == full
