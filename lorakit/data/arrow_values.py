"""Turn values of Arrow tables into values of JSON, by their types: rows of parquet and Arrow files, and of `datasets`.

    type                    value in the table           value of the row
    extension<arrow.json>   '{"default": null}'          {"default": None}      as datasets' `Json` stores it
    struct                  {"a": 1, "b": None}          {"a": 1}               a table gives every row all fields
    map                     [("a", 1)]                   {"a": 1}
    decimal                 Decimal("1.50")              1.5
    timestamp, date         datetime(2026, 1, 2)         "2026-01-02T00:00:00"

Invariant: a field that a table left empty is no field of the row, and an empty value of a JSON text stays.
"""

import datetime
import decimal
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

ReadValue = Callable[[Any], Any]


def value_reader(kind: Any, read_json: ReadValue) -> ReadValue:
    """Return a function of a value of an Arrow type, as `to_pylist` returns it, which returns the row's value.

    ``read_json``: reads a value of the type arrow.json; the function raises what it raises.
    """
    import pyarrow as pa

    inner = partial(value_reader, read_json=read_json)
    if pa.types.is_struct(kind):
        fields = {field.name: inner(field.type) for field in kind}
        return lambda value: _fields(value, fields)
    if pa.types.is_map(kind):
        item = inner(kind.item_type)
        return lambda value: {name: item(part) for name, part in value if part is not None}
    lists = ("list", "large_list", "fixed_size_list", "list_view", "large_list_view")
    if any(getattr(pa.types, f"is_{name}")(kind) for name in lists):
        element = inner(kind.value_type)
        return lambda value: [None if part is None else element(part) for part in value]
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return inner(kind.value_type)
    if getattr(kind, "extension_name", None) == "arrow.json":
        return read_json
    return json_value


def json_value(value: Any) -> Any:
    """Return a value of no known type as JSON has it: without empty fields, times as text, decimals as numbers."""
    if isinstance(value, str | int | float):  # most values
        return value
    if isinstance(value, dict):
        return {key: json_value(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [json_value(part) for part in value]
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, datetime.date | datetime.time):  # a datetime is a date
        return value.isoformat()
    return str(value) if isinstance(value, datetime.timedelta | uuid.UUID) else value


def _fields(value: Any, readers: dict[str, ReadValue]) -> Any:
    if not isinstance(value, dict):  # decoded by `datasets`: a picture, for instance
        return json_value(value)
    return {name: readers.get(name, json_value)(part) for name, part in value.items() if part is not None}
