"""Read rows from files (row_files.py) or from a hub data set.

Invariant: every row has a file and a line. A row that cannot be read is yielded as a BadRow, never skipped.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lorakit.data.row_files import BadRow, count_file_rows, dataset_reader, decode_line, form_of, json_value, read_file
from lorakit.errors import DataError, HubError, TemporaryFailure
from lorakit.files.atomic import fast_digest, is_disk_full
from lorakit.files.hub import connection_failure
from lorakit.files.progress import library_call

REASON_LETTERS: Final = 300  # of another library's error


@dataclass(frozen=True)
class RowSource:
    """One file, or one split of a hub data set."""

    name: str
    path: Path | None
    split: str | None = None
    streaming: bool = False  # read a hub data set from there row by row, and store none of it
    subset: str | None = None
    revision: str | None = None  # of a hub data set; None: the only one, the main branch

    def version(self) -> str:
        """Return a text that changes with the content: the key of caches, and the test for changed data."""
        if self.path is not None:
            # the same bytes mean other rows in another form
            return f"{form_of(self.path.name)}{self.path.suffix} {fast_digest(self.path)}"
        import datasets

        with _hub_errors(self):
            builder = datasets.load_dataset_builder(self.name, self.subset, revision=self.revision)
        # commit, or times of files: a stream's content is known only when all of it was read
        return f"{self.name}/{self.split}/{builder.hash} {builder.config_id}"


def read_rows(source: RowSource) -> Iterator[tuple[int, Any | BadRow]]:
    """Yield (line, row) of every row; a row that cannot be read is a BadRow."""
    return ((line, decode_line(raw)) for line, raw in read_raw(source))


def count_rows(sources: list[RowSource], limit: int | None) -> int | None:
    """Return the rows to read of all sources; None if that takes unpacking them, or reading a stream to its end."""
    if any(source.streaming for source in sources):
        return None
    numbers = [count_file_rows(s.path) if s.path else len(_open_hub(s)) for s in sources]
    total = sum(filter(None, numbers))
    return None if None in numbers else total if limit is None else min(total, limit)


def read_raw(source: RowSource) -> Iterator[tuple[int, Any]]:
    """Yield (line, row) of every row: the bytes of a JSON text, the row of a table, or a BadRow."""
    if source.path is not None:
        yield from read_file(source.path)
        return
    number = 0
    rows = _open_hub(source)
    read = json_value if rows.features is None else dataset_reader(rows.features)
    try:
        for row in rows:  # a stream reads the hub here
            yield number + 1, read(row)
            number += 1
    except Exception as problem:  # of datasets and its readers: each form and compression has errors of its own
        remedy = f"fix the data set, or leave out what follows with `limit: {number}`"
        unread = DataError(f"data: {source.name}: cannot be read after row {number}: {_reason(problem)}; {remedy}")
        raise _hub_error(f"data: {source.name}: after row {number}", problem, unread) from None


def _open_hub(source: RowSource) -> Any:
    import datasets

    with _hub_errors(source), library_call():
        return datasets.load_dataset(
            source.name, source.subset, split=source.split, streaming=source.streaming, revision=source.revision
        )


@contextmanager
def _hub_errors(source: RowSource) -> Iterator[None]:
    try:
        yield
    except Exception as problem:  # of datasets, huggingface_hub, its client, and the readers of each form
        no_data_set = DataError(
            f"data: {source.name}: neither a file ({Path(source.name).absolute()}) nor a data set the hub gave"
            f" (split {source.split}): {_reason(problem)}"
        )
        error = _hub_error(f"data: {source.name}", problem, no_data_set)
        raise (no_data_set if isinstance(error, HubError) else error) from None


def _hub_error(what: str, problem: Exception, otherwise: DataError) -> Exception:
    """Return the error that an error of `datasets` means. ``otherwise``: if disk and connection are sound."""
    if is_disk_full(problem):
        return problem
    failure = connection_failure(what, problem)
    if isinstance(failure, TemporaryFailure):
        return TemporaryFailure(f"{failure}; the same command tries again")
    return failure or otherwise


def _reason(problem: BaseException) -> str:
    """Return the first line of an error, and the second one where `datasets` lists the subsets there."""
    lines = str(problem).strip().splitlines() or [type(problem).__name__]
    if lines[0].startswith("Config name is missing"):
        subsets = re.findall(r"'([^']+)'", lines[1]) if len(lines) > 1 else []
        return f"it has several subsets, so name one (`subset` beside `path`): {', '.join(subsets)}"[:REASON_LETTERS]
    return lines[0][:REASON_LETTERS]
