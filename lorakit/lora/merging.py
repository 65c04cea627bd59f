"""W = W0 + s B A for a stored weight: summed in float64 some rows at a time, and rounded once."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from lorakit.lora.kinds import Kind
from lorakit.lora.methods import METHODS

BLOCK_ELEMENTS: Final = 1 << 18
HALF_WAY: Final = {torch.bfloat16: (0xFFFF, 0x8000), torch.float16: (0x1FFF, 0x1000)}
"""the bits of a float32 that are rounded away, and what they are half way between two neighbours"""


@dataclass(frozen=True)
class Update:
    """What one patch adds to one weight."""

    method: str
    scale: float
    tensors: Mapping[str, Tensor]
    """A (r, in), B (out, r)"""


def row_blocks(shape: tuple[int, int]) -> Iterator[slice]:
    """The rows of a matrix, cut into blocks of about BLOCK_ELEMENTS."""
    num_rows = max(1, BLOCK_ELEMENTS // max(1, shape[1]))
    return (slice(start, min(start + num_rows, shape[0])) for start in range(0, shape[0], num_rows))


def row_merger(kind: Kind, updates: Sequence[Update]) -> Callable[[Tensor, slice], Tensor]:
    """(stored rows in float64, which rows they are) -> the same rows merged, in the same memory.

    For a transposed kind the stored rows are columns of W.
    """

    # the factor that every block needs is widened once, the one that is cut into blocks a block at a time
    whole, cut = ("lora_B", "lora_A") if kind.transposed else ("lora_A", "lora_B")
    wide = [(u, {**u.tensors, whole: u.tensors[whole].double()}) for u in updates]

    def merge(total: Tensor, rows: slice) -> Tensor:
        for update, tensors in wide:
            factor = tensors[cut][:, rows] if kind.transposed else tensors[cut][rows]
            part = {**tensors, cut: factor.double()}
            if kind.transposed:
                total = METHODS[update.method].merge(total.T, part, update.scale).T
            else:
                total = METHODS[update.method].merge(total, part, update.scale)
        return total

    return merge


def merged_weight(W: Tensor, kind: Kind, updates: Sequence[Update], dtype: torch.dtype) -> Tensor:
    """A whole stored weight with its updates, on W's device: the float64 sum rounded once to ``dtype``."""
    merged = torch.empty_like(W, dtype=dtype)
    rounding = Rounding(dtype)
    merge = row_merger(
        kind, [Update(u.method, u.scale, {name: t.to(W.device) for name, t in u.tensors.items()}) for u in updates]
    )
    for rows in row_blocks((W.shape[0], W.shape[1])):
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
        if self._dtype not in HALF_WAY:
            return values.to(self._dtype)
        if self._narrow.numel() < values.numel() or self._narrow.device != values.device:
            self._narrow = torch.empty(values.numel(), device=values.device)
            self._bits = torch.empty_like(self._narrow, dtype=torch.int32)
        flat = self._narrow[: values.numel()]
        narrow = flat.view(values.shape).copy_(values)
        if (places := self._half_way(flat)).numel():
            exact, near = values.reshape(-1)[places], flat[places]
            bits = near.view(torch.int32)
            bits = bits - (near.double().abs() > exact.abs()).int()  # towards zero
            flat[places] = torch.where(near.double() != exact, bits | 1, bits).view(torch.float32)
        return narrow.to(self._dtype)

    def _half_way(self, flat: Tensor) -> Tensor:
        """Where float32 values lie half way between two neighbours of the dtype, as indices."""
        mask, half = HALF_WAY[self._dtype]
        bits = torch.bitwise_and(flat.view(torch.int32), mask, out=self._bits[: flat.numel()])
        found = bits == half
        if self._dtype is torch.float16:  # its smallest numbers keep fewer bits
            found |= flat.abs() < 2.0**-14
        return torch.from_numpy(np.flatnonzero(found.numpy(force=True))).to(flat.device)


def norm_of_sum(updates: Sequence[Update]) -> float:
    """The Frobenius norm of sum s B A, through the factors: |B A|^2 = sum((B^T B) * (A A^T))."""
    A = torch.cat([u.tensors["lora_A"] for u in updates])
    B = torch.cat([u.tensors["lora_B"] for u in updates], dim=1)
    s = torch.cat([torch.full((u.tensors["lora_A"].shape[0],), u.scale, dtype=torch.float64) for u in updates])
    grams = s[:, None] * _gram(B) * s * _gram(A.T)
    return math.sqrt(max(0.0, float(grams.sum())))


def _gram(M: Tensor) -> Tensor:
    """M^T M in float64, some rows at a time."""
    total = torch.zeros(M.shape[1], M.shape[1], dtype=torch.float64)
    for rows in row_blocks((M.shape[0], M.shape[1])):
        block = M[rows].double()
        total.addmm_(block.T, block)
    return total
