"""Read rows from files (row_files.py) or from a hub data set.

Invariant: every row has a file and a line. A row that cannot be read is yielded as a BadRow, never skipped.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorakit.data._internals import dataset_fingerprint
from lorakit.data.json_row import BadRow, parse_raw, without_none
from lorakit.data.row_files import count_file_rows, form_of, read_file
from lorakit.errors import DataError


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
        # the same bytes mean other rows in another form
        state = xxhash.xxh3_128(f"{form_of(self.path.name)}{self.path.suffix}".encode())
        with open(self.path, "rb") as file:
            while block := file.read(1 << 20):
                state.update(block)
        return state.hexdigest()


def read_rows(source: RowSource) -> Iterator[tuple[int, Any | BadRow]]:
    """Yield (line, row) of every row; a row that cannot be read is a BadRow."""
    return ((line, parse_raw(raw)) for line, raw in read_raw(source))


def count_rows(sources: list[RowSource]) -> int | None:
    """Return the rows of all sources; None if that takes unpacking them."""
    numbers = [count_file_rows(s.path) if s.path else len(_open_hub(s)) for s in sources]
    return None if None in numbers else sum(filter(None, numbers))


def read_raw(source: RowSource) -> Iterator[tuple[int, Any]]:
    """Yield (line, row) of every row: the bytes of a JSON text, the row of a table, or a BadRow."""
    if source.path is None:
        yield from ((line, without_none(row)) for line, row in enumerate(_open_hub(source), 1))
    else:
        yield from read_file(source.path)


def _open_hub(source: RowSource) -> Any:
    import datasets

    try:
        return datasets.load_dataset(source.name, split=source.split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetNotFoundError) as problem:
        raise DataError(
            f"data: {source.name}: neither a file ({Path(source.name).absolute()}) nor a data set the hub gave"
            f" (split {source.split}): {problem}"
        ) from None
