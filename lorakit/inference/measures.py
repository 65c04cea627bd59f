"""Measure answers against the expected ones: the measures of `score` and of evaluations in training.

A measure is a share from 0 to 1, the mean over rows, or for BLEU a function of all rows together. The mean of a
caller's own metric may be any number.
"""

import importlib.util
import json
import math
import re
import runpy
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, SupportsFloat

from lorakit.errors import DataError, LorakitError, RunError, did_you_mean

RowMeasure = Callable[[str, str], float]  # (predicted, expected) -> value of one row


class Answered(NamedTuple):
    """A generated answer. cut: it has as many tokens as allowed, and no end token."""

    text: str
    cut: bool = False


@dataclass(frozen=True)
class Measure:
    """One measure: of single rows, or of all rows together."""

    of_row: RowMeasure | None = None
    of_all: Callable[[Sequence[str], Sequence[str]], float] | None = None
    read: Callable[[str], Any] = str  # expected answer -> its value; of None it cannot be measured
    refusal: str = ""  # why it cannot
    package: str | None = None  # that it needs, besides lorakit's own
    needs_end: bool = False  # an answer that was cut has the value 0, because the rest of it is not known

    def __call__(self, predicted: Sequence[Answered], expected: Sequence[str]) -> float:
        """Return the measure of answers, at least one."""
        if self.of_all is not None:
            return self.of_all([answer.text for answer in predicted], expected)
        return sum(map(self.row_value, predicted, expected)) / len(predicted)

    def row_value(self, predicted: Answered, expected: str) -> float:
        """Return the value of one row, for a measure of single rows."""
        assert self.of_row is not None
        return 0.0 if predicted.cut and self.needs_end else self.of_row(predicted.text, expected)


NUMBER: Final = re.compile(
    r"(?:(?<![\w.)])[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)(?:[eE][-+]?\d{1,4}(?!\w))?",
    re.ASCII,
)


def _last_number(text: str) -> Decimal | None:
    """Return the last number of a text, read with or without commas between its thousands, an exponent, or a 0 before
    its point. The hyphen of 10-5 is no sign."""
    numbers = re.findall(NUMBER, text.replace("\N{MINUS SIGN}", "-"))
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def _numeric(predicted: str, expected: str) -> float:
    return float(_last_number(predicted) == _last_number(expected))


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # an answer may open brackets without end
        return None
    return value if isinstance(value, dict) else None


def _json_fields(predicted: str, expected: str) -> float:
    """Return the share of equal fields among those of either object: a missing and an added one count alike."""
    right = _json_object(expected) or {}
    got = _json_object(predicted)
    if got is None:
        return 0.0
    keys = right.keys() | got.keys()
    text = partial(json.dumps, sort_keys=True)  # compared as text, because 1 == True in Python
    equal = sum(key in right and key in got and text(right[key]) == text(got[key]) for key in keys)
    return equal / len(keys) if keys else 1.0


def _rouge(kind: str, predicted: str, expected: str) -> float:
    from rouge_score.rouge_scorer import RougeScorer

    return float(RougeScorer([kind]).score(expected, predicted)[kind].fmeasure)


def _bleu(predicted: Sequence[str], expected: Sequence[str]) -> float:
    from sacrebleu import corpus_bleu

    return float(corpus_bleu(list(predicted), [list(expected)], force=True).score) / 100


MEASURES: Final[Mapping[str, Measure]] = {
    "exact_match": Measure(lambda predicted, expected: float(predicted == expected), needs_end=True),
    "prefix": Measure(lambda predicted, expected: float(predicted.startswith(expected))),
    "numeric": Measure(_numeric, read=_last_number, refusal="its answer has no number for numeric to compare"),
    "json_fields": Measure(
        _json_fields, read=_json_object, refusal="its answer is no JSON object for json_fields to compare"
    ),
    "rouge_1": Measure(partial(_rouge, "rouge1"), package="rouge_score"),
    "rouge_2": Measure(partial(_rouge, "rouge2"), package="rouge_score"),
    "rouge_l": Measure(partial(_rouge, "rougeL"), package="rouge_score"),
    "bleu": Measure(of_all=_bleu, package="sacrebleu"),
}
"""name in a recipe and on the command line -> measure"""
RESERVED: Final = ("loss", "accuracy", "perplexity")  # names of other figures of held-out rows


def shown_value(name: str, value: float) -> str:
    """Return a value as text: in percent for a measure of lorakit, as the number it is for a caller's own metric."""
    return f"{value:.1%}" if name in MEASURES else f"{value:.4g}"


def check_measures(names: Collection[str]) -> None:
    """Raise RunError unless the packages of these measures are installed; names the command that installs them."""
    packages = {name: MEASURES[name].package for name in names}
    missing = {name: package for name, package in packages.items() if package and not importlib.util.find_spec(package)}
    if missing:
        raise RunError(f"measures: {', '.join(missing)}: not installed: pip install 'lorakit[eval]'")


def chosen_measures(names: Collection[str], metrics: Mapping[str, RowMeasure]) -> dict[str, Measure]:
    """Return measures by name, and a caller's functions as measures, checked in every call. Raises LorakitError."""
    check_measures(names)
    for name in metrics:
        if name in (*MEASURES, *RESERVED) or not name.isidentifier():
            taken = ", ".join((*RESERVED, *MEASURES))
            raise LorakitError(f"metric {name!r}: no name, or one that is taken ({taken}); rename the function")
    return {name: MEASURES[name] for name in names} | {
        name: Measure(partial(_checked, name, function)) for name, function in metrics.items()
    }


def _checked(name: str, function: RowMeasure, predicted: str, expected: str) -> float:
    where = f"for the answer {predicted[:60]!r} where {expected[:60]!r} is expected"
    try:
        value = function(predicted, expected)
    except Exception as problem:
        frame = traceback.extract_tb(problem.__traceback__)[-1]
        line = f"{Path(frame.filename).name}:{frame.lineno}"
        raise DataError(f"metric {name}: {line} raised {type(problem).__name__}: {problem} {where}") from problem
    number = math.nan
    if isinstance(value, SupportsFloat):  # numbers of numpy and torch too
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):
            number = float(value)
    if not math.isfinite(number):
        raise DataError(f"metric {name}: a number for each row, got {repr(value)[:60]} {where}")
    return number


def load_metrics(items: Sequence[str]) -> dict[str, RowMeasure]:
    """Return name -> function of FILE:FUNCTION items, or raise LorakitError. The file's code runs."""
    metrics: dict[str, RowMeasure] = {}
    for item in items:
        file, colon, name = item.rpartition(":")
        if not colon or not file.endswith(".py") or not name.isidentifier():
            raise LorakitError(f"--metric {item!r}: write it as FILE.py:FUNCTION")
        if name in metrics:
            raise LorakitError(f"--metric {item!r}: the name {name!r} is given twice")
        try:
            defined = runpy.run_path(file)
        except Exception as problem:
            raise LorakitError(f"--metric {item}: the file fails: {type(problem).__name__}: {problem}") from problem
        if not callable(function := defined.get(name)):
            names = [key for key, value in defined.items() if callable(value) and not key.startswith("_")]
            raise LorakitError(f"--metric {item}: the file has no function of that name.{did_you_mean(name, names)}")
        metrics[name] = function
    return metrics
