"""Make a row of a file's columns, as `data.columns` says: a column's name, or a text with columns in braces.

    columns   {prompt: "Question: {question}\\nAnswer: ", completion: answer}
    file      {"question": "2+2?", "answer": "4", "level": 1}
    row       {"prompt": "Question: 2+2?\\nAnswer: ", "completion": "4"}        level is not read

Invariant: a column that a row lacks is a BadRow that names the columns there are, unless its key may be absent.
"""

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from string import Formatter
from typing import Any, Final

from lorakit.data.row_files import BadRow
from lorakit.data.row_formats import FORMATS, refusal

MAY_BE_ABSENT: Final = frozenset({"weight", *(key for form in FORMATS for key in form.optional)})
"""keys of a row that it may lack"""
Columns = tuple[tuple[str, str], ...]  # (key of a row, column or template): `data.columns`


def map_columns(row: Any, columns: Columns) -> Any:
    """Return the row that ``columns`` make of a file's row, or a BadRow. Without columns, the row itself."""
    try:
        return _map(row, columns) if columns and isinstance(row, Mapping) else row
    except BadRow as problem:
        return problem


def read_columns(row: Mapping[str, Any], columns: Columns) -> set[str]:
    """Return the columns of a file's row that `map_columns` reads."""
    present = {name for name, value in row.items() if value is not None}
    read = (names for _, source in columns if present.issuperset(names := source_columns(source)))
    return {name for names in read for name in names}


def all_columns(columns: Columns) -> frozenset[str]:
    return frozenset(name for _, source in columns for name in source_columns(source))


def source_columns(source: str) -> tuple[str, ...]:
    """Return the columns of one value of `data.columns`: of a template all in braces, else the name itself."""
    return tuple(name for _, name in _parts(source) if name is not None) if "{" in source else (source,)


def _map(row: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    present = {name: value for name, value in row.items() if value is not None}
    for name in ("label", "kto_tag"):
        if str(present.get(name)).lower() == "false" and name not in all_columns(columns):
            raise refusal(name)
    result = {}
    for key, source in columns:
        missing = [name for name in source_columns(source) if name not in present]
        if not missing:
            value = _fill(source, present) if "{" in source else present[source]
            if key == "weight" and isinstance(value, str):  # as every cell of a CSV file is
                with suppress(ValueError):  # refused with all other weights
                    value = float(value)
            result[key] = value
        elif key not in MAY_BE_ABSENT:
            listed = ", ".join(map(repr, list(present)[:20])) or "none"
            raise BadRow(f"data.columns.{key}: the row has no {missing[0]!r}; its columns: {listed}")
    return result


@cache
def _parts(template: str) -> tuple[tuple[str, str | None], ...]:
    """Return (text, column after it) of a template; the last column may be None."""
    return tuple((text, name) for text, name, _, _ in Formatter().parse(template))


def _fill(template: str, row: Mapping[str, Any]) -> str:
    return "".join(text + ("" if name is None else _text(name, row[name])) for text, name in _parts(template))


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadRow(f"data.columns: {name!r} in a template is text or a number, got {type(value).__name__}")
    return str(value)
