"""Read the rows of a file, in the form that its suffix names: JSON lines, a JSON array, CSV, TSV, parquet or Arrow.

Invariant: every row has a number: its line, or its index in a table or array, from 1. A text that is no row becomes a
BadRow with the reason. Memory does not grow with the file, but for a JSON array, which is read at once.
"""

import codecs
import csv
import datetime
import decimal
import gzip
import io
import json
import math
import re
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

from lorakit.errors import DataError
from lorakit.files.text import unique_keys

MAX_LINE_BYTES: Final = 64_000_000
MAX_ARRAY_BYTES: Final = 1_000_000_000  # of a file that is one JSON array; other files are read row by row
MAX_BLANK_LINES: Final = 10_000  # between two rows, and after the last one
TABLE_ROWS: Final = 64  # rows of a table that are Python objects at a time, each of which may have megabytes
ARRAY_BEGIN: Final = re.compile(r"\s*\[[ \t\r\n]*(\]?)")
ARRAY_MARK: Final = re.compile(r"[ \t\r\n]*([,\]])[ \t\r\n]*")  # after an element
ARRAY_REMEDY: Final = "a file that is one JSON array is read if its name ends in .json"
ReadValue = Callable[[Any], Any]


class BadRow(ValueError):
    """A row that cannot be trained on; the message is the reason."""


class LongRow(BadRow):
    """A row that is too long to be tokenised."""


def decode_line(raw: Any) -> Any:
    """Return the row in the bytes of a JSON text, or a BadRow with the reason. A table's row is returned unchanged."""
    if not isinstance(raw, bytes):
        return raw
    try:
        text = raw.decode("utf-8")
        row = json.loads(text, object_pairs_hook=unique_keys, parse_constant=_finite, parse_float=_finite)
        json.dumps(row, ensure_ascii=False).encode()  # raises for half a surrogate pair, which json.loads accepts
        return row
    except UnicodeEncodeError:
        return BadRow("half a surrogate pair (\\ud800 to \\udfff), which is no character")
    except UnicodeDecodeError as problem:
        return BadRow(f"not UTF-8: byte {problem.start}")
    except json.JSONDecodeError as problem:
        array = f"; {ARRAY_REMEDY}" if raw.startswith(b"[") else ""
        return BadRow(f"not JSON: {problem.msg} at column {problem.colno}{array}")
    except RecursionError:
        return BadRow("not JSON: nested too deeply")
    except BadRow as problem:
        return problem
    except ValueError as problem:  # a number with more digits than Python reads
        return BadRow(f"not JSON: {problem}")


def parse_text(text: str, what: str) -> Any:
    """Return the value of a JSON text. Raises BadRow, which begins with ``what``: it is none."""
    value = decode_line(text.encode())
    if isinstance(value, BadRow):
        raise BadRow(f"{what}{value}")
    return value


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise BadRow(f"not JSON: {text} is no finite number")
    return number


def form_of(name: str) -> str | None:
    """Return the suffix of a file of rows, ``.jsonl`` for ``a.jsonl.gz``; None if lorakit does not read such files."""
    suffix = Path(name.removesuffix(".gz")).suffix
    is_known = suffix in TEXT_FORMS if name.endswith(".gz") else suffix in FORMS
    return suffix if is_known else None


def read_file(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (number, row): a text's bytes, a table's row, or a BadRow. Raises DataError: damaged, or another form."""
    form = form_of(path.name)
    assert form is not None
    if form in TABLES:
        yield from _read_table(path, TABLES[form])
        return
    line = 0
    try:
        with gzip.open(path, "rb") if path.name.endswith(".gz") else open(path, "rb") as file:
            if file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                raise DataError(f"{path}: UTF-16, not UTF-8; convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW{form}")
            for line, row in TEXT_FORMS[form](path, file):  # type: ignore[arg-type]
                yield line, row
    except (EOFError, gzip.BadGzipFile, zlib.error) as problem:
        raise DataError(f"{path}: cut or damaged after line {line}: {problem}") from None
    except UnicodeDecodeError as problem:
        raise DataError(f"{path}: not UTF-8 after row {line}: byte {problem.object[problem.start]:#x}") from None


def count_file_rows(path: Path) -> int | None:
    """Return the number of rows, about that of lines; None if counting takes as long as reading."""
    if path.name.endswith(".parquet"):
        import pyarrow.parquet

        return int(pyarrow.parquet.read_metadata(path).num_rows)
    if not path.name.endswith(".jsonl"):
        return None
    with open(path, "rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def _read_lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, bytes | BadRow]]:
    line = 0
    blank: list[int] = []  # blank lines are bad rows only if a row follows, because files may end in blank lines
    while raw := file.readline(MAX_LINE_BYTES + 1):
        line += 1
        if not raw.strip():
            blank.append(line)
            _refuse_blank(path, line, len(blank))
            continue
        yield from ((empty, BadRow("the line is empty")) for empty in blank)
        blank = []
        if len(raw) > MAX_LINE_BYTES:
            raise DataError(f"{path}:{line}: longer than {MAX_LINE_BYTES} bytes; one row per line")
        # a byte order mark may begin the file, which json.loads refuses
        yield line, (raw.removeprefix(codecs.BOM_UTF8) if line == 1 else raw).rstrip()


def _refuse_blank(path: Path, line: int, number: int) -> None:
    if number > MAX_BLANK_LINES:  # of which a compressed file of a megabyte may have a billion
        raise DataError(f"{path}:{line}: the last {number:,} lines are blank; remove them: grep . FILE > NEW")


def _read_json(path: Path, file: BinaryIO) -> Iterator[tuple[int, bytes | BadRow]]:
    """Yield the elements of an array, or the lines of a file that has a row on each."""
    head = file.peek(MAX_LINE_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()  # type: ignore[attr-defined]
    if head.split(b"\n", 1)[0].rstrip() == b"{":
        raise DataError(
            f"{path}: begins with an object over several lines; rows are the objects of an array, or one on each line."
            " If they are the value of a key, such as 'data': jq -c '.data[]' FILE > NEW.jsonl"
        )
    yield from (_read_array if head.startswith(b"[") else _read_lines)(path, file)


def _read_array(path: Path, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    content = file.read(MAX_ARRAY_BYTES + 1)
    if len(content) > MAX_ARRAY_BYTES:
        raise DataError(
            f"{path}: a JSON array above {MAX_ARRAY_BYTES / 1e9:g} GB, which is read at once; write a row on each line:"
            " jq -c '.[]' FILE > NEW.jsonl"
        )
    text = content.decode("utf-8-sig")
    del content
    decode = json.JSONDecoder().raw_decode
    number = 0
    mark = ARRAY_BEGIN.match(text)
    assert mark is not None
    while mark[1] != "]":
        number += 1
        try:
            _, stop = decode(text, mark.end())
        except (ValueError, RecursionError) as problem:
            why = problem.msg if isinstance(problem, json.JSONDecodeError) else "nested too deeply, or too long"
            raise DataError(f"{path}: cut or damaged at row {number}, not JSON: {why}") from None
        yield number, text[mark.end() : stop].encode()
        if (following := ARRAY_MARK.match(text, stop)) is None:
            other = text[stop:].strip()[:1]
            raise DataError(f"{path}: no JSON array after row {number}: ',' or ']' expected, got {other!r}")
        mark = following
    if rest := text[mark.end() :].strip():
        raise DataError(f"{path}: after the JSON array stands {rest[0]!r}; a file has one array")


def _read_cells(delimiter: str, path: Path, file: BinaryIO) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a table whose first line names the columns. Every cell is text."""
    csv.field_size_limit(MAX_LINE_BYTES)
    with io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        lines = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            columns = next(lines, [])
            _refuse_repeated(path, columns)
            if len(columns) == 1 and (other := next((mark for mark in ";\t|," if mark in columns[0]), None)):
                raise DataError(
                    f"{path}: the first line is one column, {columns[0][:40]!r}; {other!r} seems to delimit the cells,"
                    f" where {delimiter!r} is expected: pandas.read_csv(FILE, sep={other!r}).to_csv(NEW, index=False)"
                )
            line = lines.line_num + 1
            blank = 0
            for cells in lines:
                if len(cells) == len(columns):
                    yield line, dict(zip(columns, cells, strict=True))
                elif cells:
                    yield line, BadRow(f"has {len(cells)} cells; the first line names {len(columns)} columns")
                blank = 0 if cells else blank + 1
                _refuse_blank(path, line, blank)
                line = lines.line_num + 1
        except csv.Error as problem:
            remedy = 'a cell that begins with a quote stands in quotes, and its own are written twice: """a"" b"'
            raise DataError(f"{path}: cut or damaged at line {lines.line_num}: {problem}; {remedy}") from None


def _refuse_repeated(path: Path, columns: Sequence[str]) -> None:
    """Raise DataError if a column is named twice, because a row would have the value of the last one alone."""
    if repeated := sorted(name for name, number in Counter(columns).items() if number > 1):
        raise DataError(f"{path}: names a column twice: {', '.join(map(repr, repeated))}")


def _read_table(path: Path, batches: Callable[[Path], Iterable[Any]]) -> Iterator[tuple[int, Any]]:
    import pyarrow

    number = 0
    read_json = partial(parse_text, what="a value of the type arrow.json is ")
    try:
        for batch in batches(path):
            _refuse_repeated(path, batch.schema.names)
            read = value_reader(pyarrow.struct(batch.schema), read_json)
            for start in range(0, batch.num_rows, TABLE_ROWS):
                for row in batch.slice(start, TABLE_ROWS).to_pylist():
                    number += 1
                    try:
                        value = read(row)
                    except BadRow as problem:
                        value = problem
                    yield number, value
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{path}: cut or damaged after row {number}: {problem}") from None


def _parquet_batches(path: Path) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=TABLE_ROWS)


def _arrow_batches(path: Path) -> Any:
    """Return the batches of a file in Arrow's file form, or in its stream form, which ``datasets`` writes."""
    import pyarrow as pa

    with open(path, "rb") as file:
        is_file = file.read(6) == b"ARROW1"
    source = pa.memory_map(str(path))
    if not is_file:
        return pa.ipc.open_stream(source)
    reader = pa.ipc.open_file(source)
    return map(reader.get_batch, range(reader.num_record_batches))


def value_reader(kind: Any, read_json: ReadValue) -> ReadValue:
    """Return a function of a value of an Arrow type, as `to_pylist` returns it, which returns the row's value.

        type                    value in the table           value of the row
        extension<arrow.json>   '{"default": null}'          {"default": None}      as datasets' `Json` stores it
        struct                  {"a": 1, "b": None}          {"a": 1}               a table gives every row all fields
        map                     [("a", 1)]                   {"a": 1}
        decimal                 Decimal("1.50")              1.5
        timestamp, date         datetime(2026, 1, 2)         "2026-01-02T00:00:00"

    So a field that a table left empty is no field of the row, and an empty value of a JSON text stays.
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


def dataset_reader(features: Any) -> ReadValue:
    """Return the function that turns a row of a data set of `datasets` into a row of JSON's values."""
    import pyarrow

    return value_reader(pyarrow.struct(features.arrow_schema), lambda value: value)  # `datasets` has parsed JSON texts


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


TEXT_FORMS: Final[dict[str, Callable[[Path, BinaryIO], Iterator[tuple[int, Any]]]]] = {
    ".jsonl": _read_lines, ".json": _read_json, ".csv": partial(_read_cells, ","), ".tsv": partial(_read_cells, "\t"),
}  # fmt: skip
"""forms that may be compressed, with .gz after the suffix"""
TABLES: Final[dict[str, Callable[[Path], Iterable[Any]]]] = {".parquet": _parquet_batches, ".arrow": _arrow_batches}
FORMS: Final = (*TEXT_FORMS, *TABLES)
READ_FORMS: Final = f"{', '.join(FORMS)} (the first four also with .gz)"  # the forms, for messages
