"""Hold the factors of all resident adapters side by side, so that a batch of any of them reads a range or an index.

Invariant: an adapter's columns never move, and are free only when no call can reach that adapter any more. So adapters
are added and removed while calls run.
"""

import itertools
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

MAX_BLOCK_COLUMNS: Final = 128
"""A block is as large as all earlier ones of its layer together, up to this; or as those that were freed. So little
memory waits for an adapter, and a few products serve many. Two products with 64 columns cost the same as one with 128
(2 cores, 8 rows, 2048 x 2048)."""
FREE: Final = -1


@dataclass(frozen=True, eq=False)
class FactorColumns:
    """A and B of several adapters on one layer, a column of rank 1 after another: y += (s * (x A^T)) B."""

    A: Tensor
    """(columns, in)"""
    B: Tensor
    """(columns, out), each adapter's B transposed"""
    scales: Tensor
    """(columns,): s of the column's adapter"""
    owners: Tensor
    """(columns,): number of the column's adapter; FREE if it never had one"""

    def select(self, columns: slice | Tensor) -> "FactorColumns":
        """Return some of the columns: views for a range, copies for an index."""
        return FactorColumns(self.A[columns], self.B[columns], self.scales[columns], self.owners[columns])

    def to(self, dtype: torch.dtype) -> "FactorColumns":
        """Return the same in another dtype."""
        return FactorColumns(self.A.to(dtype), self.B.to(dtype), self.scales.to(dtype), self.owners)


@final
class Factors:
    """One adapter's columns in a layer's bank, which are freed when this object goes."""

    def __init__(self, bank: "LayerBank", block: FactorColumns, columns: range, scale: float) -> None:
        self.block, self.columns, self.scale = block, columns, scale
        self.A = block.A[columns.start : columns.stop]
        """(r, in)"""
        self.B = block.B[columns.start : columns.stop]
        """(r, out): B transposed, without the scale"""
        self._bank = bank

    def __del__(self) -> None:
        self._bank.release(self.block, self.columns)


@final
class LayerBank:
    """The factors of all adapters on one layer.

    like: a tensor with the device and the dtype of the layer's computation. sizes: (out, in).
    """

    def __init__(self, like: Tensor, sizes: tuple[int, int]) -> None:
        self._like, self._sizes = like.new_empty(0), sizes
        self._taken: dict[FactorColumns, list[range]] = {}
        """block -> the columns of its adapters, in ascending order"""
        self._most_columns = 0
        """of all blocks, so far"""
        self._released: list[tuple[FactorColumns, range]] = []
        self._lock = threading.Lock()

    @property
    def blocks(self) -> tuple[FactorColumns, ...]:
        return tuple(self._taken)

    def add(self, A: Tensor, B: Tensor, scale: float, owner: int) -> Factors:
        """Store A (r, in) and B (out, r), which must be finite; return their place."""
        rank = len(A)
        with self._lock:
            self._collect()
            block, start = self._find_gap(rank) or (self._new_block(rank), 0)
            columns = range(start, start + rank)
            self._taken[block] = sorted([*self._taken[block], columns], key=lambda taken: taken.start)
        factors = Factors(self, block, columns, scale)
        factors.A.copy_(A)
        factors.B.copy_(B.T)
        block.scales[start : start + rank], block.owners[start : start + rank] = scale, owner
        return factors

    def release(self, block: FactorColumns, columns: range) -> None:
        """Free an adapter's columns. Called when Python frees their `Factors`, which may be in the middle of `add`."""
        self._released.append((block, columns))
        if self._lock.acquire(blocking=False):  # else whoever has the lock, or the next one, collects them
            try:
                self._collect()
            finally:
                self._lock.release()

    def _collect(self) -> None:
        while self._released:
            block, columns = self._released.pop()
            self._taken[block].remove(columns)
            if not self._taken[block]:
                del self._taken[block]

    def _find_gap(self, rank: int) -> tuple[FactorColumns, int] | None:
        """Return the first gap between adapters, or after them, of this size: its block and first column."""
        for block, taken in self._taken.items():
            start = 0
            for columns in taken:
                if columns.start - start >= rank:
                    break
                start = columns.stop
            if start + rank <= len(block.owners):
                return block, start
        return None

    def _new_block(self, rank: int) -> FactorColumns:
        total = sum(len(block.owners) for block in self._taken)
        # where adapters come and go, the blocks of those that went are enough for those that come
        size = max(rank, min(MAX_BLOCK_COLUMNS, total, self._most_columns - total or total))
        self._most_columns = max(self._most_columns, total + size)
        out_features, in_features = self._sizes
        # zeros, not empty memory: products run across columns that are free, and 0 times NaN is NaN
        A, B = self._like.new_zeros(size, in_features), self._like.new_zeros(size, out_features)
        owners = torch.full((size,), FREE, device=A.device)
        block = FactorColumns(A, B, self._like.new_zeros(size), owners)
        self._taken[block] = []
        return block


@final
class AdapterBank:
    """The banks of all layers, by layer name."""

    def __init__(self) -> None:
        self.layers: dict[str, LayerBank] = {}

    def add(self, layer: str, A: Tensor, B: Tensor, scale: float, owner: int) -> Factors:
        """Store an adapter's A and B for one layer, on its device and in the dtype of its computation."""
        if layer not in self.layers:
            self.layers[layer] = LayerBank(A, (len(B), A.shape[1]))
        return self.layers[layer].add(A, B, scale, owner)


def columns_of(factors: Iterable[Factors]) -> list[FactorColumns]:
    """Return the columns of several adapters of one layer, block by block.

    A range of a block that is at least half theirs, because nothing is copied then, else an index.
    """
    by_block: dict[FactorColumns, list[range]] = {}
    for one in factors:
        by_block.setdefault(one.block, []).append(one.columns)
    return [block.select(range_or_index(own, block.owners.device, spread=2)) for block, own in by_block.items()]


def range_or_index(ranges: list[range], device: torch.device, spread: int = 1) -> slice | Tensor:
    """Return the range from the first to the last of disjoint ranges, or an index of their members on the device.

    spread: how many times as long as the ranges together their common range may be; 1: it holds nothing else.
    """
    start, stop = min(one.start for one in ranges), max(one.stop for one in ranges)
    if stop - start <= spread * sum(map(len, ranges)):
        return slice(start, stop)
    return torch.tensor([*itertools.chain(*ranges)], device=device)
