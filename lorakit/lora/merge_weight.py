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
class Update:
    """The change that one patch makes to one weight: a method's update, or rows that replace rows of the weight."""

    method: str
    scale: float
    tensors: Mapping[str, Tensor]
    """A (r, in), B (out, r) and other tensors of the method; or ``rows``, (tokens, width)"""
    weight: float = 1.0
    """factor on the complete change, as in a weighted merge of several patches"""
    tokens: tuple[int, ...] | None = None
    """token ids of the replaced rows; None for a method's update"""

    @property
    def additive(self) -> bool:
        """True if the change is s B A, whatever the weight is."""
        return self.tokens is None and METHODS[self.method].additive


def rows_update(rows: Tensor, tokens: tuple[int, ...], weight: float = 1.0) -> Update:
    """Return the update that replaces an embedding's rows `tokens` by `rows` (tokens, width)."""
    return Update("rows", 1.0, {"rows": rows}, weight, tokens)


def row_blocks(shape: tuple[int, int], *, full: bool = False) -> Iterator[slice]:
    """Yield the rows of a matrix in blocks of about BLOCK_ELEMENTS elements; `full`: in one block."""
    num_rows = shape[0] if full else max(1, BLOCK_ELEMENTS // max(1, shape[1]))
    return (slice(start, min(start + num_rows, shape[0])) for start in range(0, shape[0], max(1, num_rows)))


class RowMerger:
    """Adds updates to blocks of stored rows, in float64. Stored rows of a transposed kind are columns of W.

    `squared_changes`: for each update that is not additive, the sum of squares of its changes so far; 0 for the others.
    `needs_all_rows`: True if all rows must be one block, because a method needs full rows of W and these are columns.
    """

    def __init__(self, kind: LayerKind, updates: Sequence[Update]) -> None:
        self._kind = kind
        # every block needs all of one factor and a part of the other: the first is widened once, the other per block
        self._full_name, self._block_name = ("lora_B", "lora_A") if kind.transposed else ("lora_A", "lora_B")
        self._updates = [(u, u.tensors if u.tokens is not None else self._widened(u.tensors)) for u in updates]
        self.squared_changes = [0.0] * len(updates)
        self.needs_all_rows = kind.transposed and any(u.tokens is None and not u.additive for u in updates)

    def __call__(self, W: Tensor, rows: slice) -> Tensor:
        """Return the merged rows for stored rows W in float64, (rows, width), which are overwritten."""
        base = None if all(u.additive for u, _ in self._updates) else W.clone()
        for number, (update, tensors) in enumerate(self._updates):
            if update.additive:
                W = self._add_update(W, update, tensors, rows, update.scale * update.weight)
                continue
            assert base is not None
            # a change that depends on the weight is computed on the base, not on the other patches' sum
            merged = self._merge_alone(base.clone(), update, tensors, rows)
            change = (merged - base).reshape(-1)
            self.squared_changes[number] += update.weight**2 * float(torch.dot(change, change))
            if len(self._updates) == 1 and update.weight == 1.0:
                return merged  # exact, where W0 + (W - W0) could round
            W += update.weight * change.view_as(W)
        return W

    def _widened(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {**tensors, self._full_name: tensors[self._full_name].double()}

    def _merge_alone(self, W: Tensor, update: Update, tensors: Mapping[str, Tensor], rows: slice) -> Tensor:
        if update.tokens is None:
            return self._add_update(W, update, tensors, rows, update.scale)
        for index, token in enumerate(update.tokens):
            if rows.start <= token < rows.stop:
                W[token - rows.start] = tensors["rows"][index].double()
        return W

    def _add_update(self, W: Tensor, update: Update, tensors: Mapping[str, Tensor], rows: slice, s: float) -> Tensor:
        merge = METHODS[update.method].merge
        if self._kind.transposed:
            return merge(W.T, {**tensors, "lora_A": tensors["lora_A"][:, rows].double()}, s).T
        # beside B, the other tensors of a method (DoRA's magnitude) have one value per row of W too
        block = {name: t if name == self._full_name else t[rows].double() for name, t in tensors.items()}
        return merge(W, block, s)


def merged_weight(W: Tensor, kind: LayerKind, updates: Sequence[Update], dtype: torch.dtype) -> Tensor:
    """Return a full stored weight with its updates, on W's device: the float64 sum rounded once to `dtype`."""
    merged = torch.empty_like(W, dtype=dtype)
    rounding = Rounding(dtype)
    merge = RowMerger(
        kind, [replace(u, tensors={name: t.to(W.device) for name, t in u.tensors.items()}) for u in updates]
    )
    for rows in row_blocks((W.shape[0], W.shape[1]), full=merge.needs_all_rows):
        merged[rows] = rounding(merge(W[rows].to(torch.float64, copy=True), rows))
    return merged


def norm_of_sum(updates: Sequence[Update]) -> float:
    """Return the Frobenius norm of sum s B A from the factors: |B A|^2 = sum((B^T B) * (A A^T))."""
    A = torch.cat([u.tensors["lora_A"] for u in updates])
    B = torch.cat([u.tensors["lora_B"] for u in updates], dim=1)
    s = torch.cat(
        [torch.full((u.tensors["lora_A"].shape[0],), u.scale * u.weight, dtype=torch.float64) for u in updates]
    )
    grams = s[:, None] * _gram(B) * s * _gram(A.T)
    return math.sqrt(max(0.0, float(grams.sum())))  # rounding may leave a sum below zero


def _gram(M: Tensor) -> Tensor:
    """Return M^T M in float64, widening a block of rows at a time."""
    total = torch.zeros(M.shape[1], M.shape[1], dtype=torch.float64)
    for rows in row_blocks((M.shape[0], M.shape[1])):
        block = M[rows].double()
        total.addmm_(block.T, block)
    return total
