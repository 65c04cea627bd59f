"""Some rows of a table of tokenised rows: the training rows that are no held-out rows."""

import hashlib
from dataclasses import replace
from typing import final

import numpy as np

from lorakit.data.token_table import TokenTable


@final
class SelectedRows:
    """Rows of a table, in its order, read as a `TokenTable` is. rows: their indices, (rows,) int64.

    `counts`: rows, tokens and label tokens are those of the selected rows. All others are of what was read.
    """

    def __init__(self, table: TokenTable, rows: np.ndarray) -> None:
        self._table, self._rows = table, rows
        self.sources = table.sources
        self.lengths: np.ndarray = table.lengths[rows]
        self.digests: np.ndarray = table.digests[rows]
        self.weights: np.ndarray | None = None if table.weights is None else table.weights[rows]
        self.digest = hashlib.sha256(table.digest.encode() + rows.astype(np.int64).tobytes()).hexdigest()
        others = np.setdiff1d(np.arange(len(table)), rows, assume_unique=True)
        labels = sum(int(table.label_mask(row)[1:].sum()) for row in others)
        self.counts = replace(
            table.counts,
            rows=len(rows),
            tokens=int(self.lengths.sum()),
            label_tokens=table.counts.label_tokens - labels,
            shared=len(others),
        )

    def __len__(self) -> int:
        return len(self._rows)

    def ids(self, row: int) -> np.ndarray:
        """Return the token ids of a row, (tokens,) int32."""
        return self._table.ids(int(self._rows[row]))

    def label_mask(self, row: int) -> np.ndarray:
        """Return which tokens of a row are labels, (tokens,) bool."""
        return self._table.label_mask(int(self._rows[row]))

    def location(self, row: int) -> str:
        """Return the file and line of a row."""
        return self._table.location(int(self._rows[row]))
