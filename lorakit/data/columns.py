"""Make a row of a file's columns, as `data.columns` says: a column's name, or a text with columns in braces.

    columns   {prompt: "Question: {question}\\nAnswer: ", completion: answer}
    file      {"question": "2+2?", "answer": "4", "level": 1}
    row       {"prompt": "Question: 2+2?\\nAnswer: ", "completion": "4"}        level is not read

Invariant: a column that a row lacks is a BadRow that names the columns there are, unless its key may be absent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from string import Formatter
from typing import Any, Final

from lorakit.data.json_row import BadRow

MAY_BE_ABSENT: Final = frozenset({"input", "system", "tools", "weight"})
"""keys of a row that it may lack"""
Columns = tuple[tuple[str, str], ...]
"""(key of a row, column or template): `data.columns`"""


@dataclass(frozen=True)
class Mapped:
    """The row that the columns of a file make."""

    row: dict[str, Any]
    unread: frozenset[str]
    """columns that are not read"""
    read: tuple[str, ...]
    """columns that are read"""


def map_columns(row: Any, columns: Columns) -> Mapped:
    """Return the row that ``columns`` make of a file's row.

    Raises:
        BadRow: it lacks a column, or a template's column has neither text nor a number.
    """
    if not isinstance(row, Mapping):
        raise BadRow(f"a row is a mapping, got {type(row).__name__}")
    present = {name: value for name, value in row.items() if value is not None}
    result, read = {}, dict[str, None]()
    for key, source in columns:
        names = source_columns(source)
        missing = [name for name in names if name not in present]
        if not missing:
            read |= dict.fromkeys(names)
            value = _fill(source, present) if "{" in source else present[source]
            result[key] = _number(value) if key == "weight" else value
        elif key not in MAY_BE_ABSENT:
            listed = ", ".join(map(repr, list(present)[:20])) or "none"
            raise BadRow(f"data.columns.{key}: the row has no {missing[0]!r}; its columns: {listed}")
    return Mapped(result, frozenset(present.keys() - read.keys()), tuple(read))


def all_columns(columns: Columns) -> frozenset[str]:
    """Return every column that is named."""
    return frozenset(name for _, source in columns for name in source_columns(source))


def source_columns(source: str) -> tuple[str, ...]:
    """Return the columns of one value of `data.columns`: of a template all in braces, else the name itself."""
    return tuple(name for _, name in _parts(source) if name is not None) if "{" in source else (source,)


@cache
def _parts(template: str) -> tuple[tuple[str, str | None], ...]:
    """Return (text, column after it) of a template; the last column may be None."""
    return tuple((text, name) for text, name, _, _ in Formatter().parse(template))


def _fill(template: str, row: Mapping[str, Any]) -> str:
    return "".join(text + ("" if name is None else _text(name, row[name])) for text, name in _parts(template))


def _number(value: Any) -> Any:
    """Return the number that a text is, because every cell of a CSV file is text; another value as it is."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value  # refused with all other weights


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadRow(f"data.columns: {name!r} in a template is text or a number, got {type(value).__name__}")
    return str(value)
