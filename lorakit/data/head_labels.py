"""The label of a row for a head of the adapter's own, as a whole number: one more token, behind the row's text.

    problem type                  label of a row        number
    single_label_classification   "order"               its index among the labels
    multi_label_classification    ["order", "late"]     the sum of 2^index of each
    regression                    3.5                   the 32 bits of a float32

The problem types are transformers' words. No model reads the number as a token: a batch has token 0 in its place.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from lorakit.data.row_files import BadRow
from lorakit.recipe.objective import ProblemType

SHOWN: Final = 20  # labels in an error
VERDICTS: Final = {"true": 1, "false": -1, "1": 1, "0": -1}  # label of a row -> sign of its weight


@dataclass(frozen=True)
class HeadLabels:
    """What the rows of a head have as their label. names: the labels; of a number none is read."""

    names: tuple[str, ...]
    problem_type: ProblemType = "single_label_classification"

    @cached_property
    def _numbers(self) -> dict[str, int]:
        is_several = self.problem_type == "multi_label_classification"
        return {name: 1 << index if is_several else index for index, name in enumerate(self.names)}

    def number(self, value: Any) -> int:
        """Return the number of a row's label. Raises BadRow: it is none of the labels, or no number."""
        if self.problem_type == "regression":
            number = finite_number(value)
            if number is None:
                raise BadRow(f"label: a number expected, got {repr(value)[:60]}")
            return int.from_bytes(struct.pack("<f", number), "little", signed=True)
        is_several = self.problem_type == "multi_label_classification"
        names = {label_name(one) for one in value} if isinstance(value, list | tuple) else {label_name(value)}
        if value is None or isinstance(value, list | tuple) != is_several or not names <= self._numbers.keys():
            form = "a list" if is_several else "one"
            known = ", ".join(self.names[:SHOWN])
            raise BadRow(f"label: {form} of objective.labels ({known}) expected, got {repr(value)[:60]}")
        return sum(self._numbers[name] for name in names)

    def label(self, number: int) -> Any:
        """Return the label of a number: a text, a tuple of texts in the order of the labels, or a float."""
        if self.problem_type == "regression":
            return struct.unpack("<f", int(number).to_bytes(4, "little", signed=True))[0]
        if self.problem_type == "multi_label_classification":
            return tuple(name for name, bit in self._numbers.items() if number & bit)
        return self.names[number]


def finite_number(value: Any) -> float | None:
    """Return a number, or that of a text that is one, if it is finite in float32; else None."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
        struct.pack("<f", number)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def label_name(value: Any) -> str:
    """Return the text of a label. That of a truth value is in small letters, also of a text, which a CSV file has."""
    name = str(int(value) if isinstance(value, float) and value.is_integer() else value)
    return name.lower() if name in ("True", "False") else name


def verdict(value: Any, key: str) -> int:
    """Return the sign of a row's weight: 1 if its label says true, else -1. Raises BadRow: it is no truth value."""
    name = label_name(value).lower()
    if name not in VERDICTS:
        raise BadRow(f"{key}: true or false expected, got {repr(value)[:60]}")
    return VERDICTS[name]


def without_key(row: Any, key: str) -> tuple[dict[str, Any], Any]:
    """Return a row without a key, and its value, which is None if there is none."""
    fields = dict(row) if isinstance(row, Mapping) else {}
    value = fields.pop(key, None)
    return fields, value
