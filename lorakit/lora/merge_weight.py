"""Merge updates into one stored weight: W = W0 + s B A, summed in float64 by blocks of rows, and rounded once."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from lorakit.lora.layer_kinds import LayerKind
from lorakit.lora.methods import METHODS

BLOCK_ELEMENTS: Final = 1 << 18
"""elements of a block of rows: its float64 sum, 2 MiB, stays in a core's cache"""
HALFWAY_BITS: Final = {torch.bfloat16: (0xFFFF, 0x8000), torch.float16: (0x1FFF, 0x1000)}
"""16-bit dtype -> the bits of a float32 that rounding removes, and their value halfway between two neighbours"""


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


class Rounding:
    """Rounds float64 to the nearest value of a dtype, ties to even. Its memory is reused from call to call.

    torch converts float64 to 16 bits through float32, so it rounds twice. That is wrong where the first rounding ends
    exactly halfway between two 16-bit neighbours: the second one cannot tell on which side the float64 value was. These
    few values are rounded to float32 "to odd" instead (Boldo and Melquiond 2008): towards zero, and then with the last
    bit set if that was inexact. The set bit keeps the side, and the second rounding is correct.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._float32, self._bits = torch.empty(0), torch.empty(0, dtype=torch.int32)
        self._is_halfway = np.empty(0, dtype=np.bool_)

    def __call__(self, values: Tensor) -> Tensor:
        """Return float64 values in the dtype, each rounded once."""
        if self._dtype not in HALFWAY_BITS:
            return values.to(self._dtype)
        if self._float32.numel() < values.numel() or self._float32.device != values.device:
            self._float32 = torch.empty(values.numel(), device=values.device)
            self._bits = torch.empty_like(self._float32, dtype=torch.int32)
            self._is_halfway = np.empty(values.numel(), dtype=np.bool_)
        flat = self._float32[: values.numel()]
        float32 = flat.view(values.shape).copy_(values)
        if (indices := self._halfway_indices(flat)).size:
            _round_to_odd(flat, values.reshape(-1), indices)
        return float32.to(self._dtype)

    def rounding_error(self, exact: Tensor, rounded: Tensor) -> float:
        """Return the sum of squares of (exact - rounded) for the values of the last call; may overwrite `exact`.

        For 16 bits computed from the last call's float32 values, whose own error is smaller by 2**-13 or more. In
        float64 for other dtypes, and where a square is too large or too small for float32.
        """
        if self._dtype in HALFWAY_BITS:
            wide = self._bits[: rounded.numel()].view(torch.float32).copy_(rounded.reshape(-1))
            error = squared_norm(wide.sub_(self._float32[: rounded.numel()]))
            if math.isfinite(error) and error > 0.0:
                return error
        return squared_norm(exact.sub_(rounded.to(torch.float64)))

    def _halfway_indices(self, flat: Tensor) -> np.ndarray:
        """Return the indices of float32 values that lie halfway between two neighbours of the dtype."""
        mask, halfway = HALFWAY_BITS[self._dtype]
        bits = torch.bitwise_and(flat.view(torch.int32), mask, out=self._bits[: flat.numel()])
        is_halfway = self._is_halfway[: flat.numel()]
        if bits.device.type == "cpu":  # in numpy, because it compares integers eight times as fast as torch
            np.equal(bits.numpy(), halfway, out=is_halfway)
        else:
            is_halfway[:] = (bits == halfway).numpy(force=True)
        if self._dtype is torch.float16:
            # below 2**-14 float16 has fewer bits than the mask assumes, so that all such values are rounded to odd
            is_halfway |= (flat.abs() < 2.0**-14).numpy(force=True)
        return np.flatnonzero(is_halfway)


def _round_to_odd(flat: Tensor, exact: Tensor, indices: np.ndarray) -> None:
    """Replace float32 values at these indices by the float64 values `exact` rounded to odd."""
    if flat.device.type == "cpu":
        flat.numpy()[indices] = _to_odd(exact.numpy()[indices], flat.numpy()[indices])
        return
    where = torch.from_numpy(indices).to(flat.device)
    odd = _to_odd(exact[where].numpy(force=True), flat[where].numpy(force=True))
    flat[where] = torch.from_numpy(odd).to(flat.device)


def _to_odd(exact: np.ndarray, nearest: np.ndarray) -> np.ndarray:
    """Return float64 values rounded to float32 "to odd", from the float32 values nearest to them."""
    # one less in the bits of a float is one step towards zero, whatever its sign
    bits = nearest.view(np.int32) - (np.abs(nearest) > np.abs(exact)).astype(np.int32)
    odd: np.ndarray = (bits | (nearest != exact)).view(np.float32)
    return odd


def squared_norm(values: Tensor) -> float:
    """Return the sum of squares."""
    flat = values.reshape(-1)
    return float(torch.dot(flat, flat))


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
