"""The tokenised rows of `data.train` or `data.eval`: one table, or those of several sources one after the other.

Invariant: the rows of an epoch are a pure function of seed and epoch. A source of weight w is passed w times in an
epoch. Where that is no full pass, the next epoch goes on with it, so that all rows come equally often (decision 0042).
"""

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Final, final

import numpy as np

from lorakit.data.row_counts import RowCounts
from lorakit.data.token_table import TokenTable
from lorakit.errors import DataError

DIGESTS_AT_A_TIME: Final = 1 << 20
"""so that memory does not grow with the rows"""


@dataclass(frozen=True)
class Part:
    """The rows of one source. ``name``: labels its held-out loss; None for the only source of a recipe."""

    table: TokenTable
    name: str | None = None
    passes: float = 1.0
    """passes over its rows in an epoch"""

    @property
    def rows_per_epoch(self) -> int:
        return max(1, round(self.passes * len(self.table)))

    def rows_of_epoch(self, seed: int, index: int, epoch: int) -> np.ndarray:
        """Return the rows of an epoch, of an endless row of passes that are each in an order of their own.

        ``index``: of this part in its data set.
        """
        size, count = len(self.table), self.rows_per_epoch
        first, stop = epoch * count, (epoch + 1) * count
        passes = range(first // size, -(-stop // size))
        orders = [np.random.Generator(np.random.PCG64([seed, index, number])).permutation(size) for number in passes]
        return np.concatenate(orders)[first - passes.start * size :][:count]


def count_shared(rows: "TokenDataset", eval_rows: "TokenDataset") -> int:
    """Return the number of held-out rows whose tokens are those of a training row, by digests of both."""
    wanted = np.concatenate([part.table.digests for part in eval_rows.parts])
    shared = [
        np.intersect1d(wanted, part.table.digests[start : start + DIGESTS_AT_A_TIME])
        for part in rows.parts
        for start in range(0, len(part.table), DIGESTS_AT_A_TIME)
    ]
    return int(np.isin(wanted, np.concatenate(shared)).sum())


def without_shared(rows: "TokenDataset", eval_rows: "TokenDataset") -> "TokenDataset":
    """Return the training rows that are no held-out rows, compared as in `count_shared`.

    Raises:
        DataError: of a source every row is a held-out row too.
    """
    wanted = np.concatenate([part.table.digests for part in eval_rows.parts])
    parts = []
    for part in rows.parts:
        others = np.flatnonzero(~np.isin(part.table.digests, wanted))
        if not len(others):
            name = part.name or ", ".join(part.table.sources)
            raise DataError(f"data.on_shared_rows: drop: every row of {name} is a held-out row too; name other rows")
        is_full = len(others) == len(part.table)
        parts.append(part if is_full else replace(part, table=part.table.select(others)))
    return TokenDataset(parts)


@final
class TokenDataset:
    """Tokenised rows: ``ids(i)``, ``label_mask(i)`` and ``location(i)`` (file:line) of row i.

    ``weights``: of each row, (rows,) float32; None if all are 1. ``lengths``: tokens of each row, (rows,) int32.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        tables = [part.table for part in parts]
        self._starts = [0, *accumulate(map(len, tables))]
        """row that each part begins with, and the number of all rows"""
        self.counts = RowCounts()
        for table in tables:
            self.counts.add(table.counts)
        self.sources = [source for table in tables for source in table.sources]
        digests = [table.digest for table in tables]
        self.digest = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
        self.lengths = tables[0].lengths if len(tables) == 1 else np.concatenate([table.lengths for table in tables])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the parts, which are names of folders."""
        return TokenDataset, (self.parts,)

    def __len__(self) -> int:
        return self._starts[-1]

    @cached_property
    def weights(self) -> np.ndarray | None:
        tables = [part.table for part in self.parts]
        if all(table.weights is None for table in tables):
            return None
        ones = (np.ones(len(table), np.float32) if table.weights is None else table.weights for table in tables)
        return np.concatenate(list(ones))

    @property
    def rows_per_epoch(self) -> int:
        return sum(part.rows_per_epoch for part in self.parts)

    def rows_of_epoch(self, seed: int, epoch: int) -> np.ndarray:
        """Return the indices of an epoch's rows, sorted: every row once, but for weights of sources."""
        if all(part.passes == 1 for part in self.parts):
            return np.arange(len(self))
        rows = [part.rows_of_epoch(seed, index, epoch) for index, part in enumerate(self.parts)]
        return np.sort(np.concatenate([start + own for start, own in zip(self._starts, rows, strict=False)]))

    def rows_of_part(self, index: int) -> np.ndarray:
        """Return the indices of a part's rows."""
        return np.arange(self._starts[index], self._starts[index + 1])

    def ids(self, row: int) -> np.ndarray:
        """Return the token ids of a row, (tokens,) int32, as a view of the file."""
        return self.part_of(row).table.ids(self._index_in_part(row))

    def label_mask(self, row: int) -> np.ndarray:
        """Return which tokens of a row are labels, (tokens,) bool."""
        return self.part_of(row).table.label_mask(self._index_in_part(row))

    def location(self, row: int) -> str:
        """Return the file and line of a row: ``rows.jsonl:7``."""
        return self.part_of(row).table.location(self._index_in_part(row))

    def part_of(self, row: int) -> Part:
        """Return the part that a row is in."""
        if not 0 <= row < len(self):
            raise IndexError(row)
        return self.parts[bisect_right(self._starts, row) - 1]

    def _index_in_part(self, row: int) -> int:
        return row - self._starts[bisect_right(self._starts, row) - 1]
