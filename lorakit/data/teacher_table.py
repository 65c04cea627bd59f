"""The teacher's likeliest tokens at each label of a data set, in a folder of the token cache, memory-mapped.

A row's first token is no label, because no token predicts it.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, final

import numpy as np
import torch
from torch import Tensor

from lorakit.data.dataset import TokenDataset, finish_table, lock_table
from lorakit.data.row_counts import RowCounts

FILES: Final[dict[str, type]] = {"teacher_tokens.bin": np.int32, "teacher_log_probs.bin": np.float32}


@final
class TeacherTable:
    """The K likeliest tokens of each label of the rows, and log p of each and of all other tokens together."""

    def __init__(self, folder: Path, rows: TokenDataset) -> None:
        lock_table(folder, self)
        counts = np.array([rows.label_mask(row)[1:].sum() for row in range(len(rows))])
        self._stops = counts.cumsum()
        self._starts = self._stops - counts
        files = [np.memmap(folder / name, kind, "r").view(np.ndarray) for name, kind in FILES.items()]
        self._tokens, self._log_probs = (values.reshape(self._stops[-1], -1) for values in files)

    def labels_of(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return tokens (labels, K) int64 and log p (labels, K + 1) float32 of the labels of these rows."""
        own = np.concatenate([np.arange(self._starts[row], self._stops[row]) for row in rows])
        return torch.from_numpy(self._tokens[own].astype(np.int64)), torch.from_numpy(self._log_probs[own])


def write_teacher(folder: Path, num_rows: int, name: str, parts: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Write a table into an empty folder.

    name: that the cache shows. parts: tokens and log p of the labels of all rows in turn, as of `labels_of`.
    """
    with ExitStack() as stack:
        files = {stack.enter_context(open(folder / name, "wb")): kind for name, kind in FILES.items()}
        for part in parts:
            for values, (file, kind) in zip(part, files.items(), strict=True):
                file.write(values.numpy().astype(kind).tobytes())
    finish_table(folder, RowCounts(rows=num_rows), [name])
