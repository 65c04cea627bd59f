"""Patterns mean what `re` makes of them, and one without end is refused, while other threads go on."""

import re
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorakit.errors import LorakitError, PatchError, TargetError
from lorakit.files import patterns
from lorakit.files.patterns import as_ending, check_expression, matches_all, matches_beginning
from lorakit.lora import inject
from lorakit.patch.adapter_config import MAX_PATTERNS, parse_config
from tests.helpers.models import build

ENDLESS = r"(?=((.+)+)+[A-Z])x|(.|.)*[A-Z]"
NAME = "model.layers.10.self_attn.q_projaaaaaaaaaaaaaaaaaaaaaaaa"
PIECES = [
    "q_proj", "layers", r"\.", ".", ".*", r"\d+", "(?:q|v)_proj", "(q|k)", "[0-9]", "[^.]+", "^", "$", "(?!.*up)", "(?<=q)",
    r"\w", "{2}", "?", "+", "|", r"\b", "model", "(?i:Q)", r"\Z", "a*?",
]  # fmt: skip
NAMES = ["model.layers.0.self_attn.q_proj", "model.layers.11.mlp.up_proj", "q_proj", "lm_head", "a.b", "Q.v_proj", ""]


@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join), st.sampled_from(NAMES))
def test_a_pattern_matches_what_it_matches_for_peft(pattern: str, name: str) -> None:
    try:
        re.compile(as_ending(pattern))
    except re.error:
        with pytest.raises(ValueError, match="not a regular expression"):
            check_expression(as_ending(pattern))
        return
    assert matches_all(pattern, name) == bool(re.fullmatch(pattern, name))
    assert matches_beginning(as_ending(pattern), name) == bool(re.match(as_ending(pattern), name))


def test_a_pattern_without_end_is_refused_and_other_threads_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "MATCH_SECONDS", 0.3)
    matched = threading.Event()
    turns = 0

    def match() -> None:
        with pytest.raises(LorakitError, match="takes more than 0.3 s for the name"):
            matches_all(ENDLESS, NAME)
        matched.set()

    thread = threading.Thread(target=match)
    thread.start()
    while not matched.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 10


@pytest.mark.parametrize(
    "settings",
    [{"targets": ENDLESS}, {"exclude": ENDLESS}, {"rank_pattern": {ENDLESS: 2}}, {"alpha_pattern": {ENDLESS: 2.0}}],
)
def test_the_settings_of_an_adapter_refuse_it(settings: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "MATCH_SECONDS", 0.01)
    with pytest.raises((LorakitError, TargetError), match="write a simpler one"):
        inject(build("llama"), **settings)  # type: ignore[arg-type]


def test_tens_of_thousands_of_targets_are_looked_up_and_not_tried() -> None:
    model = build("llama")
    with pytest.raises(TargetError) as caught:
        inject(model, targets=["q_proj", *(f"none.{number}" for number in range(100_000))])
    assert str(caught.value).count("matches none") == 20


def test_a_patch_with_too_many_patterns_is_refused() -> None:
    config = {"peft_type": "LORA", "target_modules": ["q_proj"]}
    many = {f"q_proj{number}": 8 for number in range(MAX_PATTERNS + 1)}
    with pytest.raises(PatchError, match="rank_pattern has 10001 entries; at most 10000 are read"):
        parse_config(Path("x"), config | {"rank_pattern": many})


def test_an_expression_that_would_compile_for_long_is_refused_and_none_warns(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(ValueError, match="letters; at most 50,000 are read"):
        check_expression("|".join(f"a{number}" for number in range(200_000)))
    assert check_expression("[[a-z]--[b]]" * 100)
    assert not recwarn.list
