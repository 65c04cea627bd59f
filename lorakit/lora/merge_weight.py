"""W = W0 + s B A for a stored weight: summed in float64 some rows at a time, and rounded once."""

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
HALFWAY_BITS: Final = {torch.bfloat16: (0xFFFF, 0x8000), torch.float16: (0x1FFF, 0x1000)}
"""the bits of a float32 that are rounded away, and what they are half way between two neighbours"""


@dataclass(frozen=True)
class Update:
    """What one patch does to one weight: an update of a method, or rows in place of the weight's own."""

    method: str
    scale: float
    tensors: Mapping[str, Tensor]
    """A (r, in), B (out, r) and what else the method has; ``rows`` (tokens, width) of tokens"""
    weight: float = 1.0
    """by which the whole change is multiplied"""
    tokens: tuple[int, ...] | None = None

    @property
    def additive(self) -> bool:
        """Whether the change is s B A, whatever the weight is."""
        return self.tokens is None and METHODS[self.method].additive


def rows_update(rows: Tensor, tokens: tuple[int, ...], weight: float = 1.0) -> Update:
    """Rows (tokens, width) in place of an embedding's own."""
    return Update("rows", 1.0, {"rows": rows}, weight, tokens)


def row_blocks(shape: tuple[int, int], *, whole: bool = False) -> Iterator[slice]:
    """The rows of a matrix, cut into blocks of about BLOCK_ELEMENTS, or all at once."""
    num_rows = shape[0] if whole else max(1, BLOCK_ELEMENTS // max(1, shape[1]))
    return (slice(start, min(start + num_rows, shape[0])) for start in range(0, shape[0], max(1, num_rows)))


class RowMerger:
    """Adds updates to stored rows in float64, in their memory. For a transposed kind stored rows are columns of W."""

    def __init__(self, kind: LayerKind, updates: Sequence[Update]) -> None:
        self._kind = kind
        # the factor that every block needs is widened once, the one that is cut into blocks a block at a time
        self._whole, self._cut = ("lora_B", "lora_A") if kind.transposed else ("lora_A", "lora_B")
        self._updates = [
            (u, u.tensors if u.tokens is not None else {**u.tensors, self._whole: u.tensors[self._whole].double()})
            for u in updates
        ]
        self.squares = [0.0] * len(updates)
        """of the changes that are not additive: the sums of their squares"""
        self.needs_all_rows = kind.transposed and any(u.tokens is None and not u.additive for u in updates)

    def __call__(self, total: Tensor, rows: slice) -> Tensor:
        base = None if all(u.additive for u, _ in self._updates) else total.clone()
        for number, (update, tensors) in enumerate(self._updates):
            if update.additive:
                total = self._merged(total, update, tensors, rows, update.scale * update.weight)
                continue
            assert base is not None
            alone = self._alone(base.clone(), update, tensors, rows)
            change = (alone - base).reshape(-1)
            self.squares[number] += update.weight**2 * float(torch.dot(change, change))
            if len(self._updates) == 1 and update.weight == 1.0:
                return alone  # W0 + (W - W0) could round
            total += update.weight * change.view_as(total)
        return total

    def _alone(self, W: Tensor, update: Update, tensors: Mapping[str, Tensor], rows: slice) -> Tensor:
        if update.tokens is None:
            return self._merged(W, update, tensors, rows, update.scale)
        for place, token in enumerate(update.tokens):
            if rows.start <= token < rows.stop:
                W[token - rows.start] = tensors["rows"][place].double()
        return W

    def _merged(self, W: Tensor, update: Update, tensors: Mapping[str, Tensor], rows: slice, s: float) -> Tensor:
        merge = METHODS[update.method].merge
        if self._kind.transposed:
            return merge(W.T, {**tensors, "lora_A": tensors["lora_A"][:, rows].double()}, s).T
        part = {name: t if name == self._whole else t[rows].double() for name, t in tensors.items()}
        return merge(W, part, s)


def merged_weight(W: Tensor, kind: LayerKind, updates: Sequence[Update], dtype: torch.dtype) -> Tensor:
    """A whole stored weight with its updates, on W's device: the float64 sum rounded once to ``dtype``."""
    merged = torch.empty_like(W, dtype=dtype)
    rounding = Rounding(dtype)
    merge = RowMerger(
        kind, [replace(u, tensors={name: t.to(W.device) for name, t in u.tensors.items()}) for u in updates]
    )
    for rows in row_blocks((W.shape[0], W.shape[1]), whole=merge.needs_all_rows):
        merged[rows] = rounding(merge(W[rows].to(torch.float64, copy=True), rows))
    return merged


class Rounding:
    """Rounds float64 to the nearest of a dtype, ties to even, in memory that is used again for the next values.

    torch goes from float64 to 16 bits through float32 and so rounds twice, which is wrong where the first rounding ends
    half way between two neighbours. Those few are rounded to odd instead (Boldo and Melquiond 2008), which keeps on
    which side they were.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._narrow, self._bits = torch.empty(0), torch.empty(0, dtype=torch.int32)

    def __call__(self, values: Tensor) -> Tensor:
        if self._dtype not in HALFWAY_BITS:
            return values.to(self._dtype)
        if self._narrow.numel() < values.numel() or self._narrow.device != values.device:
            self._narrow = torch.empty(values.numel(), device=values.device)
            self._bits = torch.empty_like(self._narrow, dtype=torch.int32)
        flat = self._narrow[: values.numel()]
        narrow = flat.view(values.shape).copy_(values)
        if (places := self._half_way(flat)).size:
            _round_to_odd(flat, values.reshape(-1), places)
        return narrow.to(self._dtype)

    def rounding_error(self, exact: Tensor, rounded: Tensor) -> float:
        """The sum of squares of what the last call's rounding took; ``exact`` may be overwritten.

        For 16 bits from the float32 values on the way, which are nearer by far than what they are rounded to; where
        squares leave float32's range, and for other dtypes, in float64.
        """
        if self._dtype in HALFWAY_BITS:
            wide = self._bits[: rounded.numel()].view(torch.float32).copy_(rounded.reshape(-1))
            found = squared_norm(wide.sub_(self._narrow[: rounded.numel()]))
            if math.isfinite(found) and found > 0.0:
                return found
        return squared_norm(exact.sub_(rounded.to(torch.float64)))

    def _half_way(self, flat: Tensor) -> np.ndarray:
        """Where float32 values lie half way between two neighbours of the dtype, as indices."""
        mask, half = HALFWAY_BITS[self._dtype]
        bits = torch.bitwise_and(flat.view(torch.int32), mask, out=self._bits[: flat.numel()])
        on_cpu = bits.device.type == "cpu"  # where numpy compares integers eight times as fast as torch
        found = bits.numpy() == half if on_cpu else (bits == half).numpy(force=True)
        if self._dtype is torch.float16:  # its smallest numbers keep fewer bits
            found |= (flat.abs() < 2.0**-14).numpy(force=True)
        return np.flatnonzero(found)


def _round_to_odd(flat: Tensor, exact: Tensor, places: np.ndarray) -> None:
    """Let float32 values at these indices be what rounding the exact ones to odd would have made of them."""
    where = torch.from_numpy(places).to(flat.device)
    near, wanted = (values[where].numpy(force=True) for values in (flat, exact))
    wide = near.astype(np.float64)
    bits = near.view(np.int32) - (np.abs(wide) > np.abs(wanted))  # towards zero
    odd = np.where(wide != wanted, bits | 1, bits).astype(np.int32).view(np.float32)
    flat[where] = torch.from_numpy(odd).to(flat.device)


def squared_norm(values: Tensor) -> float:
    """The sum of squares."""
    flat = values.reshape(-1)
    return float(torch.dot(flat, flat))


def norm_of_sum(updates: Sequence[Update]) -> float:
    """The Frobenius norm of sum s B A, through the factors: |B A|^2 = sum((B^T B) * (A A^T))."""
    A = torch.cat([u.tensors["lora_A"] for u in updates])
    B = torch.cat([u.tensors["lora_B"] for u in updates], dim=1)
    s = torch.cat(
        [torch.full((u.tensors["lora_A"].shape[0],), u.scale * u.weight, dtype=torch.float64) for u in updates]
    )
    grams = s[:, None] * _gram(B) * s * _gram(A.T)
    return math.sqrt(max(0.0, float(grams.sum())))


def _gram(M: Tensor) -> Tensor:
    """M^T M in float64, some rows at a time."""
    total = torch.zeros(M.shape[1], M.shape[1], dtype=torch.float64)
    for rows in row_blocks((M.shape[0], M.shape[1])):
        block = M[rows].double()
        total.addmm_(block.T, block)
    return total
