"""Measures of answers."""

import re
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from lorakit.cli import generate
from lorakit.errors import DataError, LorakitError, RunError
from lorakit.inference.measures import MEASURES, Answered, check_measures, chosen_measures, load_metrics
from lorakit.recipe.schema import MeasureName


@pytest.mark.parametrize(
    ("name", "predicted", "expected", "value"),
    [
        ("exact_match", "yes", "yes", 1.0),
        ("exact_match", "Yes", "yes", 0.0),
        ("prefix", "yes, and more", "yes", 1.0),
        ("prefix", "ye", "yes", 0.0),
        ("numeric", "so it is 1,234.50 dollars", "1234.5", 1.0),
        ("numeric", "first 7, then -3", "#### -3", 1.0),
        ("numeric", "none", "3", 0.0),
        ("numeric", "12,34", "1234", 0.0),
        ("numeric", "2e5", "1e5", 0.0),
        ("numeric", "about 3.0e-7", "3e-7", 1.0),
        ("numeric", "5", ".5", 0.0),
        ("numeric", "0.5", ".50", 1.0),
        ("numeric", "10-5", "-5", 0.0),
        ("numeric", "\N{MINUS SIGN}5", "-5", 1.0),
        ("numeric", "1e" + "9" * 30, "9", 0.0),
        ("json_fields", '{"b": 2, "a": 1}', '{"a": 1, "b": 2}', 1.0),
        ("json_fields", '{"a": 1, "c": 2}', '{"a": 1, "b": 2}', 1 / 3),
        ("json_fields", '{"a": true}', '{"a": 1}', 0.0),
        ("json_fields", "{not json", '{"a": 1}', 0.0),
        ("json_fields", "[1]", '{"a": 1}', 0.0),
        ("json_fields", "[" * 100_000, '{"a": 1}', 0.0),
        ("rouge_1", "the cat sat", "the cat sat down", 6 / 7),
        ("rouge_2", "the cat sat", "the cat sat down", 0.8),
        ("rouge_l", "sat the cat", "the cat sat down", 4 / 7),
        ("bleu", "the cat sat on the mat", "the cat sat on the mat", 1.0),
        ("bleu", "dogs", "the cat sat on the mat", 0.0),
    ],
)
def test_a_measure_of_one_answer(name: str, predicted: str, expected: str, value: float) -> None:
    if package := MEASURES[name].package:
        pytest.importorskip(package)
    assert MEASURES[name]([Answered(predicted)], [expected]) == pytest.approx(value, abs=1e-9)


def test_a_measure_of_answers_is_their_mean_and_bleu_is_of_all_together() -> None:
    assert MEASURES["numeric"]([Answered(text) for text in "12x"], ["1", "3", "4"]) == pytest.approx(1 / 3)
    pytest.importorskip("sacrebleu")
    long, short = "the cat sat on the mat and slept", "a dog"
    both = MEASURES["bleu"]([Answered(long), Answered("no")], [long, short])
    assert both != pytest.approx((1 + MEASURES["bleu"]([Answered("no")], [short])) / 2)


def test_an_answer_that_was_cut_is_no_exact_match_and_counts_in_other_measures() -> None:
    cut = [Answered("a b", cut=True)]
    assert (MEASURES["exact_match"](cut, ["a b"]), MEASURES["prefix"](cut, ["a"])) == (0.0, 1.0)


def test_recipes_and_commands_name_the_same_measures() -> None:
    assert tuple(MEASURES) == get_args(MeasureName) == generate.MEASURES


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RunError, match=r"rouge_l, bleu: not installed: pip install 'lorakit\[eval\]'"):
        check_measures(["exact_match", "rouge_l", "bleu"])
    check_measures(["exact_match", "json_fields"])


def test_a_function_of_a_file_measures_too(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def same_length(predicted, expected):\n    return len(predicted) == len(expected)\n"
    )
    measures = chosen_measures(["prefix"], load_metrics([f"{tmp_path}/own.py:same_length"]))
    assert list(measures) == ["prefix", "same_length"]
    assert measures["same_length"]([Answered("ab"), Answered("c")], ["xy", "zz"]) == 0.5
    assert "own" not in sys.modules


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("own.py", "write it as FILE.py:FUNCTION"),
        ("own:length", "write it as FILE.py:FUNCTION"),
        ("absent.py:length", "the file fails: FileNotFoundError: "),
        ("{own}:lenght", "no function of that name. Nearest: 'length'"),
        ("{own}:NUMBER", "no function of that name"),
        ("{bad}:length", "the file fails: ZeroDivisionError: division by zero"),
    ],
)
def test_a_metric_that_cannot_be_loaded_is_one_line(tmp_path: Path, item: str, said: str) -> None:
    own, bad = tmp_path / "own.py", tmp_path / "bad.py"
    own.write_text("NUMBER = 3\ndef length(predicted, expected):\n    return len(predicted)\n")
    bad.write_text("1 / 0\n")
    with pytest.raises(LorakitError) as caught:
        load_metrics([item.format(own=own, bad=bad)])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [None, "1", float("nan"), 10**400, torch.ones(2)], ids=type)
def test_a_metric_that_returns_no_number_is_an_error(value: Any) -> None:
    measure = chosen_measures([], {"mine": lambda predicted, expected: value})["mine"]
    with pytest.raises(
        DataError,
        match=rf"metric mine: a number for each row, got {re.escape(repr(value)[:60])} for the answer 'a' where 'b'",
    ):
        measure([Answered("a")], ["b"])


@pytest.mark.parametrize("name", ["loss", "accuracy", "perplexity"])
def test_a_metric_cannot_stand_in_for_another_figure_of_held_out_rows(name: str) -> None:
    with pytest.raises(LorakitError, match=f"metric '{name}': no name, or one that is taken"):
        chosen_measures([], {name: lambda predicted, expected: 1.0})


def test_a_metric_that_raises_is_named_with_its_line_and_the_answer() -> None:
    def boom(predicted: str, expected: str) -> float:
        return {}[predicted]  # type: ignore[no-any-return]

    measure = chosen_measures([], {"boom": boom})["boom"]
    with pytest.raises(
        LorakitError, match=r"metric boom: test_measures.py:\d+ raised KeyError: 'x' for the answer 'x'"
    ):
        measure([Answered("x")], ["y"])


def test_a_metric_with_the_name_of_a_measure_is_refused() -> None:
    with pytest.raises(LorakitError, match="metric 'prefix': no name, or one that is taken"):
        chosen_measures([], {"prefix": lambda predicted, expected: 1.0})
