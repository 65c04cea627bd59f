"""Rows of one row's prompt and another row's answer, which is no answer to it.

Invariant: which answer follows which prompt depends on the number of rows alone, so every evaluation of the same rows
reads the same.
"""

from typing import Any, final

import numpy as np

from lorakit.data.dataset import TokenDataset


@final
class MismatchedRows(TokenDataset):
    """As many rows as there are, of two or more, cut to the longest of them. Prompts end at the first label token."""

    def __init__(self, rows: TokenDataset) -> None:
        super().__init__(rows.parts)
        order = np.random.Generator(np.random.Philox(0)).permutation(len(rows))
        self._others = np.empty_like(order)
        self._others[order] = np.roll(order, 1)  # one cycle through all rows, so none is its own
        self._prompts = np.array([rows.label_mask(row).argmax() for row in range(len(rows))])
        self.lengths = np.minimum(self._prompts + (rows.lengths - self._prompts)[self._others], rows.lengths.max())

    def __reduce__(self) -> tuple[Any, ...]:
        return MismatchedRows, (TokenDataset(self.parts),)

    def _tokens(self, column: str, row: int) -> np.ndarray:
        other = int(self._others[row])
        prompt = super()._tokens(column, row)[: self._prompts[row]]
        answer = super()._tokens(column, other)[self._prompts[other] :]
        return np.concatenate([prompt, answer])[: self.lengths[row]]
