"""Merge updates into one stored weight: W = W0 + s B A, summed in float64 by blocks of rows, and rounded once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from lorakit.lora.layer_kinds import LayerKind
from lorakit.lora.methods import METHODS

BLOCK_ELEMENTS: Final = 1 << 18  # elements of a block of rows: its float64 sum, 2 MiB, stays in a core's cache
HALFWAY_BITS: Final = {torch.bfloat16: (0xFFFF, 0x8000), torch.float16: (0x1FFF, 0x1000)}
"""16-bit dtype -> the bits of a float32 that rounding removes, and their value halfway between two neighbours"""


@dataclass(frozen=True)
class LowRankUpdate:
    """The change that one patch makes to one weight by a method."""

    method: str
    scale: float
    tensors: Mapping[str, Tensor]  # A (r, in), B (out, r) and other tensors of the method
    weight: float = 1.0  # factor on the complete change, as in a weighted merge of several patches

    @property
    def additive(self) -> bool:
        """True if the change is s B A, whatever the weight is."""
        return METHODS[self.method].additive


@dataclass(frozen=True)
class RowsUpdate:
    """Rows of one patch that replace rows of an embedding's weight."""

    tokens: tuple[int, ...]
    rows: Tensor  # (tokens, width)
    weight: float = 1.0  # factor on the complete change
    additive: ClassVar[bool] = False


WeightChange = LowRankUpdate | RowsUpdate


def merged_blocks(
    kind: LayerKind, updates: Sequence[Sequence[WeightChange]], shape: tuple[int, int]
) -> Iterator[tuple[slice, Callable[[Tensor], Tensor]]]:
    """Yield the stored rows of matrices, one below the other, in blocks, each with the function that merges it.

    It returns the merged rows of stored rows W in float64, (rows, width), which it overwrites. shape: of each matrix.
    """
    for number, own in enumerate(updates):
        needs_full_rows = any(isinstance(update, LowRankUpdate) and not update.additive for update in own)
        is_one = kind.stored_axis == "in" and needs_full_rows  # stored rows are columns of W then
        num_rows = max(1, shape[0] if is_one else BLOCK_ELEMENTS // max(1, shape[1]))
        first = number * shape[0]
        for start in range(0, shape[0], num_rows):
            rows = slice(start, min(start + num_rows, shape[0]))
            yield slice(first + rows.start, first + rows.stop), partial(_merged_rows, kind, own, rows)


def _merged_rows(kind: LayerKind, updates: Sequence[WeightChange], rows: slice, W: Tensor) -> Tensor:
    base = None if all(update.additive for update in updates) else W.clone()
    for update in updates:
        if base is None or update.additive:
            W = _updated(kind, update, rows, W, update.weight)
            continue
        # a change that depends on the weight is computed on the base, not on the other patches' sum
        merged = _updated(kind, update, rows, base.clone())
        if len(updates) == 1 and update.weight == 1.0:
            return merged  # exact, where W0 + (W - W0) could round
        W += update.weight * (merged - base)
    return W


def _updated(kind: LayerKind, update: WeightChange, rows: slice, W: Tensor, weight: float = 1.0) -> Tensor:
    """Return rows W with an update, overwritten. weight: factor on the scale of s B A."""
    if isinstance(update, RowsUpdate):
        for index, token in enumerate(update.tokens):
            if rows.start <= token < rows.stop:
                W[token - rows.start] = update.rows[index].to(W)
        return W
    method = METHODS[update.method]
    axis = kind.stored_axis
    block = {name: method.tensors[name].part(tensor, axis, rows).to(W) for name, tensor in update.tensors.items()}
    return kind.matrix(method.merge(kind.matrix(W), block, update.scale * weight))


def rounded_once(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float64 values rounded to the nearest of a dtype, ties to even.

    torch converts float64 to 16 bits through float32, so it rounds twice, which is wrong where the first rounding ends
    halfway between two 16-bit neighbours. These few values are rounded to float32 "to odd" (Boldo and Melquiond 2008):
    towards zero, with the last bit set if that was inexact. The bit keeps the side, and the second rounding is correct.
    """
    if dtype not in HALFWAY_BITS:
        return values.to(dtype)
    float32 = values.to(torch.float32).reshape(-1)
    where = _halfway_indices(float32, dtype)
    nearest = float32[where]
    exact = values.reshape(-1)[where]
    # one less in the bits of a float is one step towards zero, whatever its sign
    bits = nearest.view(torch.int32) - (nearest.abs() > exact.abs()).int()
    float32[where] = (bits | (nearest != exact).int()).view(torch.float32)
    return float32.view(values.shape).to(dtype)


def _halfway_indices(float32: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the indices of float32 values that lie halfway between two neighbours of a 16-bit dtype."""
    mask, halfway = HALFWAY_BITS[dtype]
    bits = float32.view(torch.int32)
    on_cpu = bits.device.type == "cpu"
    # in numpy, because it compares integers eight times as fast as torch
    is_halfway = torch.from_numpy((bits.numpy() & mask) == halfway) if on_cpu else (bits & mask) == halfway
    if dtype is torch.float16:
        # below 2**-14 float16 has fewer bits than the mask assumes, so that all such values are rounded to odd
        is_halfway |= float32.abs() < 2.0**-14
    return torch.from_numpy(np.flatnonzero(is_halfway.numpy())) if on_cpu else is_halfway.nonzero()[:, 0]


def merged_weight(W: Tensor, kind: LayerKind, updates: Sequence[Sequence[WeightChange]], dtype: torch.dtype) -> Tensor:
    """Return a stored weight, or one of each expert, (E, ...), on W's device: float64 sums rounded once to `dtype`."""
    stored = W.flatten(0, -2)
    merged = torch.empty_like(stored, dtype=dtype)
    for rows, merge in merged_blocks(kind, updates, (W.shape[-2], W.shape[-1])):
        merged[rows] = rounded_once(merge(stored[rows].to(torch.float64, copy=True)), dtype)
    return merged.view(W.shape)
