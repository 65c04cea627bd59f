"""Hold the factors of all resident adapters side by side, so that a batch of any of them reads a range or an index.

Invariant: an adapter's ranks never move, and are free only when no call can reach that adapter any more. So adapters
are added and removed while calls run.
"""

import itertools
import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, final

import torch
import torch.nn.functional as F
from torch import Tensor

from lorakit.ops.batch_invariance import RANK_STEP, is_height_dependent

MAX_BLOCK_RANKS: Final = 128
"""A block is as large as all earlier ones of its layer together, up to this; or as those that were freed. So little
memory waits for an adapter, and a few products serve many. Two products with 64 ranks cost the same as one with 128
(2 cores, 8 rows, 2048 x 2048)."""
FREE: Final = -1


@dataclass(frozen=True, eq=False)
class RankBlock:
    """A and B of several adapters on one layer, one component of rank 1 after another: y += (s * (x A^T)) B."""

    A: Tensor  # (ranks, in)
    B: Tensor  # (ranks, out), each adapter's B transposed
    scales: Tensor  # (ranks,): s of its adapter
    owners: Tensor  # (ranks,): number of its adapter; FREE if it never had one

    def select(self, ranks: slice | Tensor) -> "RankBlock":
        """Return some of the ranks: views for a range, copies for an index."""
        return RankBlock(self.A[ranks], self.B[ranks], self.scales[ranks], self.owners[ranks])

    def to(self, dtype: torch.dtype) -> "RankBlock":
        """Return the same in another dtype."""
        return RankBlock(self.A.to(dtype), self.B.to(dtype), self.scales.to(dtype), self.owners)


@final
class Factors:
    """One adapter's ranks in a layer's bank, which are free when this object goes."""

    def __init__(self, block: RankBlock, ranks: range) -> None:
        self.block = block
        self.ranks = ranks
        self.scales = block.scales[ranks.start : ranks.stop]
        self.A = block.A[ranks.start : ranks.stop]  # (r, in)
        self.B = block.B[ranks.start : ranks.stop]  # (r, out): B transposed, without the scale


@final
class LayerBank:
    """The factors of all adapters on one layer. like: has the layer's device and dtype. sizes: (out, in)."""

    def __init__(self, like: Tensor, sizes: tuple[int, int]) -> None:
        self._like = like.new_empty(0)
        self._sizes = sizes
        self._stored: list[weakref.ref[Factors]] = []
        self._most_ranks = 0  # of all blocks, so far
        self._lock = threading.Lock()

    @property
    def _taken(self) -> dict[RankBlock, list[range]]:
        """Block -> the ranks of its adapters. A block is freed with the last one of them."""
        taken: dict[RankBlock, list[range]] = {}
        for reference in self._stored:
            if (factors := reference()) is not None:
                taken.setdefault(factors.block, []).append(factors.ranks)
        return taken

    def add(self, A: Tensor, B: Tensor, scale: float, owner: int) -> Factors:
        """Store A (r, in) and B (out, r), which must be finite; return their place."""
        if is_height_dependent(self._like):
            num_more = -len(A) % RANK_STEP
            A = F.pad(A, (0, 0, 0, num_more))
            B = F.pad(B, (0, num_more))
        rank = len(A)
        with self._lock:
            taken = self._taken
            block, start = _find_gap(taken, rank) or (self._new_block(taken, rank), 0)
            factors = Factors(block, range(start, start + rank))
            self._stored = [one for one in self._stored if one() is not None] + [weakref.ref(factors)]
        factors.A.copy_(A)
        factors.B.copy_(B.T)
        factors.scales[:] = scale
        block.owners[start : start + rank] = owner
        return factors

    def _new_block(self, taken: Iterable[RankBlock], rank: int) -> RankBlock:
        total = sum(len(block.owners) for block in taken)
        # where adapters come and go, the blocks of those that went are enough for those that come
        size = max(rank, min(MAX_BLOCK_RANKS, total, self._most_ranks - total or total))
        self._most_ranks = max(self._most_ranks, total + size)
        out_features, in_features = self._sizes
        # zeros, not empty memory: products run across ranks that are free, and 0 times NaN is NaN
        A = self._like.new_zeros(size, in_features)
        B = self._like.new_zeros(size, out_features)
        owners = torch.full((size,), FREE, device=A.device)
        return RankBlock(A, B, self._like.new_zeros(size), owners)


def _find_gap(taken: Mapping[RankBlock, list[range]], rank: int) -> tuple[RankBlock, int] | None:
    """Return the first gap between adapters, or after them, of this size: its block and first rank."""
    for block, own in taken.items():
        start = 0
        for ranks in sorted(own, key=lambda ranks: ranks.start):
            if ranks.start - start >= rank:
                break
            start = ranks.stop
        if start + rank <= len(block.owners):
            return block, start
    return None


def rank_blocks(factors: Iterable[Factors]) -> list[RankBlock]:
    """Return the ranks of several adapters of one layer by block: a range, which copies nothing, if half is theirs."""
    by_block: dict[RankBlock, list[range]] = {}
    for one in factors:
        by_block.setdefault(one.block, []).append(one.ranks)
    return [block.select(range_or_index(own, block.owners.device, spread=2)) for block, own in by_block.items()]


def range_or_index(ranges: list[range], device: torch.device, spread: int = 1) -> slice | Tensor:
    """Return the range from the first to the last of disjoint ranges, or an index of their members on the device.

    spread: how many times as long as the ranges together their common range may be; 1: it holds nothing else.
    """
    start = min(one.start for one in ranges)
    stop = max(one.stop for one in ranges)
    if stop - start <= spread * sum(map(len, ranges)):
        return slice(start, stop)
    return torch.tensor([*itertools.chain(*ranges)], device=device)
