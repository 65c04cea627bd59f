"""W = W0 + s B A for a stored weight: summed in float64 some rows at a time, and rounded once."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from lorakit.lora.kinds import Kind
from lorakit.lora.methods import METHODS

BLOCK_ELEMENTS: Final = 1 << 18


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
    wide = [(u, {name: tensor.double() for name, tensor in u.tensors.items()}) for u in updates]

    def merge(total: Tensor, rows: slice) -> Tensor:
        for update, tensors in wide:
            A, B = tensors["lora_A"], tensors["lora_B"]
            if kind.transposed:
                part = {**tensors, "lora_A": A[:, rows]}
                total = METHODS[update.method].merge(total.T, part, update.scale).T
            else:
                total = METHODS[update.method].merge(total, {**tensors, "lora_B": B[rows]}, update.scale)
        return total

    return merge


def merged_weight(W: Tensor, kind: Kind, updates: Sequence[Update], dtype: torch.dtype) -> Tensor:
    """A whole stored weight with its updates, on W's device: the float64 sum rounded once to ``dtype``."""
    merged = torch.empty_like(W, dtype=dtype)
    merge = row_merger(
        kind, [Update(u.method, u.scale, {name: t.to(W.device) for name, t in u.tensors.items()}) for u in updates]
    )
    for rows in row_blocks((W.shape[0], W.shape[1])):
        merged[rows] = merge(W[rows].to(torch.float64, copy=True), rows).to(dtype)
    return merged


def norm_of_sum(updates: Sequence[Update]) -> float:
    """The Frobenius norm of sum s B A, through the factors: |B A|^2 = sum((B^T B) * (A A^T))."""
    A = torch.cat([u.tensors["lora_A"].double() for u in updates])
    B = torch.cat([u.scale * u.tensors["lora_B"].double() for u in updates], dim=1)
    return math.sqrt(max(0.0, float(((B.T @ B) * (A @ A.T)).sum())))
