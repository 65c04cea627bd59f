"""Read rows from JSON lines (plain or .gz), parquet, a folder of them, or a hub data set.

Invariant: every row has a file and a line. A row that cannot be read is yielded as a BadRow, never skipped.
"""

import codecs
import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from lorakit.data._internals import dataset_fingerprint
from lorakit.errors import DataError, did_you_mean

MAX_LINE_BYTES: Final = 64_000_000
SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".parquet")
CONVERTIBLE: Final = (".json", ".csv", ".arrow")
"""suffixes of files of rows that an error says how to convert"""
ARRAY_REMEDY: Final = (
    "a file that is one JSON array becomes rows, one a line, by"
    " python -c \"import json; [print(json.dumps(row)) for row in json.load(open('FILE'))]\" > rows.jsonl"
)


class BadRow(ValueError):
    """A row that cannot be trained on; the message is the reason."""


@dataclass(frozen=True)
class RowSource:
    """One file, or one split of a hub data set."""

    name: str
    path: Path | None
    split: str | None = None

    def digest(self) -> str:
        """Return a digest of the content: the key of caches, and the test for changed data."""
        import xxhash

        if self.path is None:
            return xxhash.xxh3_128_hexdigest(
                f"{self.name}/{self.split}/{dataset_fingerprint(_open_hub(self))}".encode()
            )
        state = xxhash.xxh3_128(self.path.suffix.encode())  # the same bytes mean other rows under another suffix
        with open(self.path, "rb") as file:
            while block := file.read(1 << 20):
                state.update(block)
        return state.hexdigest()


def find_sources(names: str | tuple[str, ...], split: str) -> list[RowSource]:
    """Return the files named by a recipe's ``data.train`` or ``data.eval``, in a fixed order.

    Raises:
        DataError: a file that does not exist (with the absolute path tried), or of an unknown form.
    """
    sources, problems = list[RowSource](), list[str]()
    for name in [names] if isinstance(names, str) else names:
        try:
            sources += _find(name, split)
        except DataError as problem:
            problems.append(str(problem))
    if problems:
        raise DataError("\n".join(problems))
    paths = [str(source.path.resolve()) if source.path else source.name for source in sources]
    repeated = {path for path in paths if paths.count(path) > 1}
    if repeated:
        raise DataError(f"data: named twice: {', '.join(sorted(repeated))}")
    return sources


def read_rows(source: RowSource) -> Iterator[tuple[int, Any | BadRow]]:
    """Yield (line, row) of every row; a row that cannot be read is a BadRow."""
    return ((line, parse_raw(raw)) for line, raw in read_raw(source))


def count_rows(sources: list[RowSource]) -> int | None:
    """Return the rows of all sources; None if that takes unpacking them."""
    numbers = [_count_rows(source) for source in sources]
    return None if None in numbers else sum(filter(None, numbers))


def _count_rows(source: RowSource) -> int | None:
    if source.path is None:
        return len(_open_hub(source))
    if source.path.name.endswith(".gz"):
        return None
    if source.path.name.endswith(".parquet"):
        import pyarrow.parquet

        return int(pyarrow.parquet.read_metadata(source.path).num_rows)
    with open(source.path, "rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def parse_raw(raw: Any) -> Any | BadRow:
    """Return the row that `read_raw` read."""
    return parse_row(raw) if isinstance(raw, bytes) else raw


def read_raw(source: RowSource) -> Iterator[tuple[int, Any]]:
    """Yield (line, row) of every row: the bytes of a JSON line, the row of a table, or a BadRow."""
    if source.path is None:
        yield from ((line, without_none(row)) for line, row in enumerate(_open_hub(source), 1))
    elif source.path.name.endswith(".parquet"):
        yield from _read_parquet(source.path)
    else:
        with _open_lines(source.path) as file:
            yield from _read_lines(source.path, file)


def _find(name: str, split: str) -> list[RowSource]:
    path = Path(name)
    if _is(path, Path.is_dir):
        return _find_in_folder(path)
    if _is(path, Path.is_file):
        if not name.endswith(SUFFIXES):
            raise DataError(f"data: {name}: lorakit reads files ending in {', '.join(SUFFIXES)}; {_conversion(path)}")
        return [RowSource(name, path)]
    missing = f"data: {name}: no such file or folder; looked for {path.absolute()}"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.endswith((*SUFFIXES, *CONVERTIBLE, ".txt")):
        if _is(path.parent, Path.is_dir):  # a mistyped path, for which the hub would be searched for half a minute
            raise DataError(
                f"{missing}.{_nearest_files(path)} {path.parent} is a folder here, so"
                " the hub was not searched; for a hub data set of this name run from another folder"
            )
        return [RowSource(name, None, split)]
    if "*" in name:
        raise DataError(
            f"{missing}. Patterns are not expanded: name a folder, or the files in a list: [a.jsonl, b.jsonl]"
        )
    raise DataError(f"{missing}.{_nearest_files(path)}")


def _nearest_files(path: Path) -> str:
    """Return the files beside a missing one with the most similar names, as a sentence; empty if there are none."""
    beside = path.parent.iterdir() if _is(path.parent, Path.is_dir) else ()
    return did_you_mean(str(path), map(str, beside))


def _conversion(path: Path) -> str:
    """Return the sentence that says how a file of rows in another form becomes one that lorakit reads."""
    if path.suffix == ".json":
        return (
            "rename it to .jsonl if it has a row on each line; a JSON array becomes such a file by"
            ' python -c "import json;'
            f" [print(json.dumps(row)) for row in json.load(open('{path}'))]\" > {path.with_suffix('.jsonl')}"
        )
    if path.suffix in CONVERTIBLE:
        return (
            f"this one becomes such a file by python -c \"import datasets; datasets.load_dataset('{path.suffix[1:]}',"
            f" data_files='{path}')['train'].to_parquet('{path.with_suffix('.parquet')}')\""
        )
    return "rename it, or convert it"


def _find_in_folder(folder: Path) -> list[RowSource]:
    files = sorted(path for path in folder.iterdir() if not path.name.startswith((".", "_")) and path.suffix != ".md")
    other = [path.name for path in files if not (path.is_file() and path.name.endswith(SUFFIXES))]
    if other:
        raise DataError(
            f"data: {folder} also holds {', '.join(map(repr, other[:4]))}, which lorakit does not read"
            f" (only {', '.join(SUFFIXES)}); move them away, or name the files one by one"
        )
    if not files:
        raise DataError(f"data: {folder.absolute()} holds no file ending in {', '.join(SUFFIXES)}")
    return [RowSource(str(path), path) for path in files]


def _is(path: Path, test: Callable[[Path], bool]) -> bool:
    try:
        return test(path)
    except (OSError, ValueError) as problem:  # a name too long, or with a NUL
        raise DataError(f"data: {str(path)[:80]!r} is no file name: {problem}") from None


def without_none(value: Any) -> Any:
    """Remove the empty fields of a table's row, because a table gives every row the fields of all rows."""
    if isinstance(value, dict):
        return {key: without_none(part) for key, part in value.items() if part is not None}
    return [without_none(part) for part in value] if isinstance(value, list) else value


def _open_lines(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.name.endswith(".gz") else open(path, "rb")  # type: ignore[return-value]


def _read_lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, bytes | BadRow]]:
    line = 0
    blank: list[int] = []  # blank lines are bad rows only if a row follows, because files may end in blank lines
    try:
        while raw := file.readline(MAX_LINE_BYTES + 1):
            line += 1
            if not raw.strip():
                blank.append(line)
                continue
            yield from ((empty, BadRow("the line is empty")) for empty in blank)
            blank = []
            if len(raw) > MAX_LINE_BYTES:
                raise DataError(f"{path}:{line}: longer than {MAX_LINE_BYTES} bytes; one row per line")
            if line == 1 and raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise DataError(f"{path}: UTF-16, not UTF-8; convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW.jsonl")
            # a byte order mark may begin the file, which json.loads refuses
            yield line, (raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw).rstrip()
    except (EOFError, gzip.BadGzipFile, zlib.error) as problem:
        raise DataError(f"{path}: cut or damaged after line {line}: {problem}") from None


def parse_row(raw: bytes) -> Any | BadRow:
    """Parse one JSON line, or return a BadRow with the reason."""
    try:
        row = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constants, parse_float=_finite
        )
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


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise BadRow(f"key {next(name for name in names if names.count(name) > 1)!r} appears twice")
    return result


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise BadRow(f"not JSON: {text} is too large for a number")
    return number


def _no_constants(text: str) -> Any:
    raise BadRow(f"not JSON: {text}")


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    line = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                line += 1
                yield line, without_none(row)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{path}: cut or damaged after row {line}: {problem}") from None


def _open_hub(source: RowSource) -> Any:
    import datasets

    try:
        return datasets.load_dataset(source.name, split=source.split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetNotFoundError) as problem:
        raise DataError(
            f"data: {source.name}: neither a file ({Path(source.name).absolute()}) nor a data set the hub gave"
            f" (split {source.split}): {problem}"
        ) from None
