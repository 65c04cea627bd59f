"""Read rows from files (row_files.py) or from a hub data set.

Invariant: every row has a file and a line. A row that cannot be read is yielded as a BadRow, never skipped.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lorakit.data._internals import dataset_fingerprint
from lorakit.data.json_row import BadRow, parse_raw, without_none
from lorakit.data.row_files import count_file_rows, form_of, read_file
from lorakit.errors import DataError, TemporaryFailure
from lorakit.files.atomic import is_disk_full
from lorakit.files.hub import connection_failure
from lorakit.files.progress import library_call, report_progress

REASON_LETTERS: Final = 300
"""of another library's error"""


@dataclass(frozen=True)
class RowSource:
    """One file, or one split of a hub data set."""

    name: str
    path: Path | None
    split: str | None = None
    streaming: bool = False
    """read a hub data set from there row by row, and store none of it"""
    subset: str | None = None
    revision: str | None = None
    """of a hub data set; None: the only one, the main branch"""

    def digest(self) -> str:
        """Return a digest of the content: the key of caches, and the test for changed data."""
        import xxhash

        if self.path is None:
            version = _stream_version(self) if self.streaming else dataset_fingerprint(_open_hub(self))
            return xxhash.xxh3_128_hexdigest(f"{self.name}/{self.split}/{version}".encode())
        # the same bytes mean other rows in another form
        state = xxhash.xxh3_128(f"{form_of(self.path.name)}{self.path.suffix}".encode())
        with open(self.path, "rb") as file:
            while block := file.read(1 << 20):
                state.update(block)
                report_progress()
        return state.hexdigest()


def read_rows(source: RowSource) -> Iterator[tuple[int, Any | BadRow]]:
    """Yield (line, row) of every row; a row that cannot be read is a BadRow."""
    return ((line, parse_raw(raw)) for line, raw in read_raw(source))


def count_rows(sources: list[RowSource]) -> int | None:
    """Return the rows of all sources; None if that takes unpacking them, or reading a stream to its end."""
    if any(source.streaming for source in sources):
        return None
    numbers = [count_file_rows(s.path) if s.path else len(_open_hub(s)) for s in sources]
    return None if None in numbers else sum(filter(None, numbers))


def read_raw(source: RowSource) -> Iterator[tuple[int, Any]]:
    """Yield (line, row) of every row: the bytes of a JSON text, the row of a table, or a BadRow."""
    if source.path is None:
        rows = _open_hub(source)
        yield from ((line, without_none(row)) for line, row in enumerate(_streamed(source, rows), 1))
    else:
        yield from read_file(source.path)


def _open_hub(source: RowSource) -> Any:
    import datasets

    with _hub_errors(source.name, source.split), library_call():
        return datasets.load_dataset(
            source.name, source.subset, split=source.split, streaming=source.streaming, revision=source.revision
        )


def _streamed(source: RowSource, rows: Any) -> Iterator[Any]:
    """Yield the rows of a hub data set. A stream reads the hub here.

    Raises:
        DataError: what it reads are no rows. TemporaryFailure: the connection broke. HubError: the hub refused.
    """
    number = 0
    try:
        for row in rows:
            yield row
            number += 1
    except Exception as problem:  # of datasets and its readers: each form and compression has errors of its own
        raise _row_error(source.name, number, problem) from None


def _row_error(name: str, number: int, problem: Exception) -> Exception:
    """Return what an error between two rows of a stream means."""
    if is_disk_full(problem):
        return problem
    failure = connection_failure(f"data: {name}: after row {number}", problem)
    if isinstance(failure, TemporaryFailure):
        return TemporaryFailure(f"{failure}; the same command tokenises again")
    if failure is not None:
        return failure
    return DataError(
        f"data: {name}: cannot be read after row {number}: {_reason(problem)}; mend the data set, or leave out what"
        f" follows with `limit: {number}`"
    )


def _reason(problem: BaseException) -> str:
    """Return the first line of an error, and the second one where `datasets` lists the subsets there."""
    lines = str(problem).strip().splitlines() or [type(problem).__name__]
    if lines[0].startswith("Config name is missing"):
        subsets = re.findall(r"'([^']+)'", lines[1]) if len(lines) > 1 else []
        return f"it has several subsets, so name one (`subset` beside `path`): {', '.join(subsets)}"[:REASON_LETTERS]
    return lines[0][:REASON_LETTERS]


def _stream_version(source: RowSource) -> str:
    """Return what changes when a data set that is streamed does: its commit on the hub, the times of a folder's files.

    The content itself is known only when all of it was read.
    """
    import datasets

    with _hub_errors(source.name, None):
        builder = datasets.load_dataset_builder(source.name, source.subset, revision=source.revision)
    return f"{builder.hash} {builder.config_id}"


@contextmanager
def _hub_errors(name: str, split: str | None) -> Iterator[None]:
    try:
        yield
    except Exception as problem:  # of datasets, huggingface_hub, its client, and the readers of each form
        if is_disk_full(problem):
            raise
        failure = connection_failure(f"data: {name}", problem)
        if isinstance(failure, TemporaryFailure):
            raise TemporaryFailure(f"{failure}; the same command tries again") from None
        which = "" if split is None else f" (split {split})"
        raise DataError(
            f"data: {name}: neither a file ({Path(name).absolute()}) nor a data set the hub gave{which}:"
            f" {_reason(problem)}"
        ) from None
