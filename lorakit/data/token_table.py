"""Tokenised rows in a folder of the user's cache: a file of plain numbers for each column, memory-mapped.

`rows.json` has the counts. The tokens of row i begin at ``starts[i]`` of the files of tokens and labels.
"""

import hashlib
import json
import os
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Final, final

import numpy as np

from lorakit.data.cache_entries import ROWS, mark_in_use
from lorakit.data.row_counts import RowCounts
from lorakit.files.atomic import MANIFEST, write_json, write_manifest

TOKEN_COLUMNS: Final[dict[str, type]] = {"input_ids": np.int32, "label_mask": np.bool_}
"""columns with a value for each token -> type of the values"""
ROW_COLUMNS: Final[dict[str, type]] = {
    "starts": np.int64, "lengths": np.int32, "sources": np.int32, "lines": np.int64, "weights": np.float32,
    "digests": np.uint64,
}  # fmt: skip
"""columns with a value for each row -> type of the values"""
CONTENT: Final = ("input_ids", "label_mask", "lengths", "weights")
"""columns that the digest of a table covers: not the names, order or lines of files"""
Columns = Mapping[str, np.ndarray]


@final
class TokenTable:
    """Tokenised rows: ``ids(i)``, ``label_mask(i)`` and ``location(i)`` (file:line) of row i.

    ``weights``: of each row, (rows,) float32; None if all are 1. ``lengths``: tokens of each row, (rows,) int32.
    ``digests``: of each row's tokens, (rows,) uint64. ``sources``: names of files. ``selected``: indices of the rows in
    use, (rows,) int64; None: all. ``counts``: rows, tokens and label tokens are those of the rows in use, all others
    are of what was read.
    """

    def __init__(self, folder: Path, sources: list[str], selected: np.ndarray | None = None) -> None:
        weakref.finalize(self, os.close, mark_in_use(folder))
        self.folder = folder
        self.sources = sources
        self._selected = selected
        columns = {name: _map(folder, name, kind) for name, kind in (TOKEN_COLUMNS | ROW_COLUMNS).items()}
        self._input_ids = columns["input_ids"]
        self._label_mask = columns["label_mask"]
        rows = {name: columns[name] if selected is None else columns[name][selected] for name in ROW_COLUMNS}
        self._starts = rows["starts"]
        self._source_of_row = rows["sources"]
        self._lines = rows["lines"]
        self.lengths = rows["lengths"]
        self.digests = rows["digests"]
        facts = json.loads((folder / ROWS).read_text())
        self.weights: np.ndarray | None = rows["weights"] if facts["is_weighted"] else None
        self.counts = RowCounts(**facts["counts"])
        manifest = json.loads((folder / MANIFEST).read_text())
        self.digest = _joint_digest(manifest[_file(name)]["sha256"] for name in CONTENT)
        if selected is not None:
            self.digest = _joint_digest([self.digest, hashlib.sha256(selected.astype(np.int64).tobytes()).hexdigest()])
            self.counts = self._counts_of_selected(columns["lengths"], columns["starts"], selected)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the folder's name, so that the processes of a machine map the same files."""
        return TokenTable, (self.folder, self.sources, self._selected)

    def __len__(self) -> int:
        return len(self.lengths)

    def select(self, rows: np.ndarray) -> "TokenTable":
        """Return a table of these rows of this one, in their order. rows: indices, (rows,) int64."""
        return TokenTable(self.folder, self.sources, rows if self._selected is None else self._selected[rows])

    def ids(self, row: int) -> np.ndarray:
        """Return the token ids of a row, (tokens,) int32, as a view of the file."""
        return self._tokens(self._input_ids, row)

    def label_mask(self, row: int) -> np.ndarray:
        """Return which tokens of a row are labels, (tokens,) bool."""
        return self._tokens(self._label_mask, row)

    def location(self, row: int) -> str:
        """Return the file and line of a row: ``rows.jsonl:7``."""
        return f"{self.sources[self._source_of_row[row]]}:{self._lines[row]}"

    def _tokens(self, column: np.ndarray, row: int) -> np.ndarray:
        if not 0 <= row < len(self):
            raise IndexError(row)
        start = self._starts[row]
        return column[start : start + self.lengths[row]]

    def _counts_of_selected(self, lengths: np.ndarray, starts: np.ndarray, selected: np.ndarray) -> RowCounts:
        others = np.setdiff1d(np.arange(len(lengths)), selected, assume_unique=True)
        # without a row's first token, which no token predicts
        labels = sum(int(self._label_mask[starts[row] + 1 : starts[row] + lengths[row]].sum()) for row in others)
        return replace(
            self.counts,
            rows=len(selected),
            tokens=int(self.lengths.sum()),
            label_tokens=self.counts.label_tokens - labels,
            shared=len(others),
        )


@final
class TableWriter:
    """Writes a table into a folder, chunk by chunk, so that memory does not grow with the rows."""

    def __init__(self, folder: Path, files: Mapping[str, BinaryIO]) -> None:
        self._folder, self._files = folder, files
        self._num_tokens = 0
        self._is_weighted = False

    def append(self, columns: Columns) -> None:
        """Append rows. columns: all columns but ``starts``, see TOKEN_COLUMNS and ROW_COLUMNS."""
        stops = self._num_tokens + np.cumsum(columns["lengths"], dtype=np.int64)
        starts = stops - columns["lengths"]
        self._num_tokens += len(columns["input_ids"])
        self._is_weighted |= bool(np.any(columns["weights"] != 1))
        for name, kind in (TOKEN_COLUMNS | ROW_COLUMNS).items():
            values = starts if name == "starts" else columns[name]
            self._files[name].write(values.astype(kind, copy=False).tobytes())

    def finish(self, counts: RowCounts, sources: list[str]) -> None:
        """Write the counts and the manifest. The table is complete then."""
        for file in self._files.values():
            file.flush()
        facts = {"counts": counts.facts(), "is_weighted": self._is_weighted, "sources": sources}
        write_json(self._folder / ROWS, facts)
        write_manifest(self._folder)


def open_writer(folder: Path, resources: ExitStack) -> TableWriter:
    """Open the files of a new table in an empty folder. ``resources``: closes them."""
    names = TOKEN_COLUMNS | ROW_COLUMNS
    return TableWriter(folder, {name: resources.enter_context(open(folder / _file(name), "wb")) for name in names})


def is_complete(folder: Path) -> bool:
    """True if a folder has every file of its manifest, each of the size that the manifest names."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return all((folder / name).stat().st_size == entry["bytes"] for name, entry in manifest.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _file(column: str) -> str:
    return f"{column}.bin"


def _map(folder: Path, column: str, kind: type) -> np.ndarray:
    # without numpy's subclass for mapped files, whose slices are slow to make
    return np.memmap(folder / _file(column), kind, "r").view(np.ndarray)


def _joint_digest(digests: Any) -> str:
    return hashlib.sha256("".join(digests).encode()).hexdigest()
