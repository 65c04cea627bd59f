"""Rows of one row's prompt and another row's answer, which is no answer to it.

Invariant: which answer follows which prompt depends on the number of rows alone, so every evaluation of the same rows
reads the same.
"""

from typing import final

import numpy as np

from lorakit.data.dataset import TokenDataset
from lorakit.errors import DataError


@final
class MismatchedRows(TokenDataset):
    """As many rows as there are, cut to the longest of them. Prompts end at the first label token.

    Raises DataError: there is one row.
    """

    def __init__(self, rows: TokenDataset) -> None:
        super().__init__(rows.parts)
        if len(rows) == 1:
            raise DataError(f"{rows.location(0)}: is the only row, and objective kto compares it with others' answers")
        order = np.random.Generator(np.random.Philox(0)).permutation(len(rows))
        self._others = np.empty_like(order)
        self._others[order] = np.roll(order, 1)  # one cycle through all rows, so none is its own
        self._prompts = np.array([rows.label_mask(row).argmax() for row in range(len(rows))])
        answers = rows.lengths - self._prompts
        self.lengths = np.minimum(self._prompts + answers[self._others], rows.lengths.max())

    def _tokens(self, column: str, row: int) -> np.ndarray:
        other = int(self._others[row])
        prompt = super()._tokens(column, row)[: self._prompts[row]]
        answer = super()._tokens(column, other)[self._prompts[other] :]
        return np.concatenate([prompt, answer])[: self.lengths[row]]
