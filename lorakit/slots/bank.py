"""Hold the factors of all resident adapters side by side, so that one product serves a batch of any of them.

Invariant: an adapter's slot never moves, and is free only when no call can reach that adapter any more.
"""

import threading
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

MAX_BLOCK_RANKS: Final = 128
"""A block is as large as all earlier ones of its rank together, up to this; or as those that were freed; the first one
as large as its adapters are expected to be. So little memory waits for an adapter, and a few products serve many."""


@dataclass(frozen=True, eq=False)
class FactorBlock:
    """A and B of adapters of one rank on one layer: y += (x A^T) B for the tokens of each slot's adapter."""

    A: Tensor  # (slots, r, in)
    B: Tensor  # (slots, r, out), each adapter's s B transposed

    def part(self, slots: range, dtype: torch.dtype) -> "FactorBlock":
        """Return some of the slots in a dtype, unless their own is wider: views, if it is the block's own."""
        parts = (tensor[slots.start : slots.stop] for tensor in (self.A, self.B))
        return FactorBlock(*(part.to(torch.promote_types(dtype, part.dtype)) for part in parts))


@final
class Factors:
    """One adapter's slot in a layer's bank, which is free when this object goes."""

    def __init__(self, block: FactorBlock, slot: int) -> None:
        self.block = block
        self.slot = slot
        self.A = block.A[slot]  # (r, in)
        self.B = block.B[slot]  # (r, out): s B transposed


@final
class LayerBank:
    """The factors of all adapters on one layer. expected_adapters: for which the first block has room."""

    def __init__(self, expected_adapters: int = 1) -> None:
        self._expected_adapters = expected_adapters
        self.taken: dict[FactorBlock, set[int]] = {}
        """block -> the slots of its adapters; a block is freed with the last one of them"""
        self._most_slots = Counter[int]()  # rank -> slots of all its blocks, so far
        self._lock = threading.RLock()  # which `_free` takes too: a collection may call it anywhere, also in `add`

    def add(self, A: Tensor, B: Tensor) -> Factors:
        """Store A (r, in) and s B (out, r) of the layer's device; return their place."""
        with self._lock:
            blocks = (block for block in reversed([*self.taken]) if block.A.shape[1] == len(A))
            with_room = (block for block in blocks if len(self.taken.get(block, ())) < len(block.A))
            block = next(with_room, None) or self._new_block(A, B)
            own = self.taken.setdefault(block, set())
            slot = next(slot for slot in range(len(block.A)) if slot not in own)
            own.add(slot)
            self.taken[block] = own  # again, if its last adapter went meanwhile
        factors = Factors(block, slot)
        weakref.finalize(factors, self._free, block, slot)
        factors.A.copy_(A)
        factors.B.copy_(B.T)
        return factors

    def _free(self, block: FactorBlock, slot: int) -> None:
        with self._lock:
            self.taken[block].remove(slot)
            if not self.taken[block]:
                del self.taken[block]

    def _new_block(self, A: Tensor, B: Tensor) -> FactorBlock:
        """Return a block for factors of a rank of which no slot is free."""
        rank = len(A)
        num_slots = sum(len(block.A) for block in [*self.taken] if block.A.shape[1] == rank)
        # where adapters come and go, the blocks of those that went are enough for those that come
        more = min(num_slots, self._most_slots[rank] - num_slots or num_slots)
        more = more or self._expected_adapters - sum(map(len, [*self.taken.values()]))
        size = max(1, min(MAX_BLOCK_RANKS // rank, more))
        self._most_slots[rank] = max(self._most_slots[rank], num_slots + size)
        return FactorBlock(A.new_empty(size, *A.shape), A.new_empty(size, *B.T.shape))
