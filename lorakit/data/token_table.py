"""One file of tokenised rows in the user's cache, memory-mapped."""

import hashlib
import json
import os
import weakref
from pathlib import Path
from typing import Any, Final

import numpy as np

from lorakit.data.cache_entries import ROWS, mark_in_use
from lorakit.data.row_counts import RowCounts
from lorakit.data.token_records import LABEL_MASK
from lorakit.files.atomic import MANIFEST

WEIGHTS: Final = "weights.npy"
DIGESTS: Final = "digests.npy"
ROWS_PER_BLOCK: Final = 1024
"""rows of a block of rows.arrow; not changed, because the digest of the same tokens would change with it"""


class TokenTable:
    """Tokenised rows, memory-mapped: ``ids(i)``, ``label_mask(i)`` and ``location(i)`` (file:line) of row i.

    ``weights``: of each row, (rows,) float32; None if all are 1. ``lengths``: tokens of each row, (rows,) int32.
    ``digests``: of each row's tokens, (rows,) uint64.
    """

    def __init__(self, folder: Path, sources: list[str]) -> None:
        import pyarrow as pa

        weakref.finalize(self, os.close, mark_in_use(folder))
        facts = json.loads((folder / ROWS).read_text())
        self.counts = RowCounts(**{name: fact for name, fact in facts.items() if name != "sources"})
        self.sources = sources
        manifest = json.loads((folder / MANIFEST).read_text())
        self.digest: str = manifest["rows.arrow"]["sha256"]
        self.weights: np.ndarray | None = None
        if WEIGHTS in manifest:
            self.weights = np.load(folder / WEIGHTS, mmap_mode="r")
            self.digest = hashlib.sha256((self.digest + manifest[WEIGHTS]["sha256"]).encode()).hexdigest()
        file = pa.ipc.open_file(pa.memory_map(str(folder / "rows.arrow")))
        self._blocks = [file.get_batch(index) for index in range(file.num_record_batches)]
        self.lengths: np.ndarray = np.load(folder / "lengths.npy", mmap_mode="r")
        self.digests: np.ndarray = np.load(folder / DIGESTS, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.lengths)

    def ids(self, row: int) -> np.ndarray:
        """Return the token ids of a row, (tokens,) int32, as a view of the file."""
        values, start, stop = self._column(row, "input_ids")
        return np.frombuffer(values, np.int32)[start:stop]

    def label_mask(self, row: int) -> np.ndarray:
        """Return which tokens of a row are labels, (tokens,) bool."""
        values, start, stop = self._column(row, LABEL_MASK)  # Arrow stores 8 of them in a byte
        bits = np.unpackbits(np.frombuffer(values, np.uint8)[start // 8 : -(-stop // 8)], bitorder="little")
        return bits[start % 8 : start % 8 + stop - start].view(bool)

    def _column(self, row: int, column: str) -> tuple[Any, int, int]:
        """Return the buffer of a block, and the row's start and stop in it. pyarrow's ``to_numpy`` imports pandas."""
        values = self._cell(row, column).values
        return values.buffers()[1], values.offset, values.offset + len(values)

    def location(self, row: int) -> str:
        """Return the file and line of a row: ``rows.jsonl:7``."""
        return f"{self.sources[self._cell(row, 'source').as_py()]}:{self._cell(row, 'line').as_py()}"

    def _cell(self, row: int, column: str) -> Any:
        if not 0 <= row < len(self):
            raise IndexError(row)
        return self._blocks[row // ROWS_PER_BLOCK].column(column)[row % ROWS_PER_BLOCK]
