"""Merge updates into one stored weight: W = W0 + s B A, summed in float64 by blocks of rows, and rounded once."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from lorakit.lora.layer_kinds import LayerKind
from lorakit.lora.methods import METHODS
from lorakit.lora.rounding import Rounding

BLOCK_ELEMENTS: Final = 1 << 18
"""elements of a block of rows: its float64 sum, 2 MiB, stays in a core's cache"""


@dataclass(frozen=True)
class LowRankUpdate:
    """The change that one patch makes to one weight by a method."""

    method: str
    scale: float
    tensors: Mapping[str, Tensor]
    """A (r, in), B (out, r) and other tensors of the method"""
    weight: float = 1.0
    """factor on the complete change, as in a weighted merge of several patches"""

    @property
    def additive(self) -> bool:
        """True if the change is s B A, whatever the weight is."""
        return METHODS[self.method].additive


@dataclass(frozen=True)
class RowsUpdate:
    """Rows of one patch that replace rows of an embedding's weight."""

    tokens: tuple[int, ...]
    rows: Tensor
    """(tokens, width)"""
    weight: float = 1.0
    """factor on the complete change"""

    @property
    def additive(self) -> bool:
        return False


WeightChange = LowRankUpdate | RowsUpdate


def row_blocks(shape: tuple[int, int], *, full: bool = False) -> Iterator[slice]:
    """Yield the rows of a matrix in blocks of about BLOCK_ELEMENTS elements; `full`: in one block."""
    num_rows = shape[0] if full else max(1, BLOCK_ELEMENTS // max(1, shape[1]))
    return (slice(start, min(start + num_rows, shape[0])) for start in range(0, shape[0], max(1, num_rows)))


class RowMerger:
    """Adds updates to blocks of stored rows, in float64. Stored rows of a transposed kind are columns of W.

    `squared_changes`: for each update that is not additive, the sum of squares of its changes so far; 0 for the others.
    `needs_all_rows`: True if all rows must be one block, because a method needs full rows of W and these are columns.
    """

    def __init__(self, kind: LayerKind, updates: Sequence[WeightChange]) -> None:
        self._kind = kind
        self._axis = kind.stored_axis
        self._updates = [self._widened(update) if isinstance(update, LowRankUpdate) else update for update in updates]
        self.squared_changes = [0.0] * len(updates)
        needs_full_rows = any(isinstance(update, LowRankUpdate) and not update.additive for update in updates)
        self.needs_all_rows = self._axis == "in" and needs_full_rows

    def __call__(self, W: Tensor, rows: slice) -> Tensor:
        """Return the merged rows for stored rows W in float64, (rows, width), which are overwritten."""
        base = None if all(update.additive for update in self._updates) else W.clone()
        for number, update in enumerate(self._updates):
            if isinstance(update, LowRankUpdate) and update.additive:
                W = self._add_update(W, update, rows, update.scale * update.weight)
                continue
            assert base is not None
            # a change that depends on the weight is computed on the base, not on the other patches' sum
            merged = self._merge_alone(base.clone(), update, rows)
            change = (merged - base).reshape(-1)
            self.squared_changes[number] += update.weight**2 * float(torch.dot(change, change))
            if len(self._updates) == 1 and update.weight == 1.0:
                return merged  # exact, where W0 + (W - W0) could round
            W += update.weight * change.view_as(W)
        return W

    def _widened(self, update: LowRankUpdate) -> LowRankUpdate:
        """Return the update in float64 where every block needs all of a tensor; others are widened block by block."""
        named = METHODS[update.method].tensors
        tensors = {name: t if self._axis in named[name].axes else t.double() for name, t in update.tensors.items()}
        return replace(update, tensors=tensors)

    def _merge_alone(self, W: Tensor, update: WeightChange, rows: slice) -> Tensor:
        if isinstance(update, LowRankUpdate):
            return self._add_update(W, update, rows, update.scale)
        for index, token in enumerate(update.tokens):
            if rows.start <= token < rows.stop:
                W[token - rows.start] = update.rows[index].double()
        return W

    def _add_update(self, W: Tensor, update: LowRankUpdate, rows: slice, s: float) -> Tensor:
        method = METHODS[update.method]
        block = {
            name: method.tensors[name].part(tensor, self._axis, rows).double()
            for name, tensor in update.tensors.items()
        }
        return self._kind.matrix(method.merge(self._kind.matrix(W), block, s))


def merged_weight(W: Tensor, kind: LayerKind, updates: Sequence[WeightChange], dtype: torch.dtype) -> Tensor:
    """Return a full stored weight with its updates, on W's device: the float64 sum rounded once to `dtype`."""
    merged = torch.empty_like(W, dtype=dtype)
    rounding = Rounding(dtype)
    merge = RowMerger(kind, [_on_device(update, W.device) for update in updates])
    for rows in row_blocks((W.shape[0], W.shape[1]), full=merge.needs_all_rows):
        merged[rows] = rounding(merge(W[rows].to(torch.float64, copy=True), rows))
    return merged


def _on_device(update: WeightChange, device: torch.device) -> WeightChange:
    if isinstance(update, RowsUpdate):
        return replace(update, rows=update.rows.to(device))
    return replace(update, tensors={name: tensor.to(device) for name, tensor in update.tensors.items()})


def norm_of_sum(updates: Sequence[WeightChange]) -> float:
    """Return the Frobenius norm of sum s B A of additive updates: |B A|^2 = sum((B^T B) * (A A^T))."""
    low_rank = [update for update in updates if isinstance(update, LowRankUpdate) and update.additive]
    assert len(low_rank) == len(updates)
    A = torch.cat([update.tensors["lora_A"] for update in low_rank])
    B = torch.cat([update.tensors["lora_B"] for update in low_rank], dim=1)
    ranks = torch.tensor([len(update.tensors["lora_A"]) for update in low_rank])
    scales = torch.tensor([update.scale * update.weight for update in low_rank], dtype=torch.float64)
    s = scales.repeat_interleave(ranks)
    grams = s[:, None] * _gram(B) * s * _gram(A.T)
    return math.sqrt(max(0.0, float(grams.sum())))  # rounding may leave a sum below zero


def _gram(M: Tensor) -> Tensor:
    """Return M^T M in float64, widening a block of rows at a time."""
    total = torch.zeros(M.shape[1], M.shape[1], dtype=torch.float64)
    for rows in row_blocks((M.shape[0], M.shape[1])):
        block = M[rows].double()
        total.addmm_(block.T, block)
    return total
