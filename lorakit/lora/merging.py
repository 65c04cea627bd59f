"""W = W0 + s B A for a stored weight: summed in float64 some rows at a time, and rounded once."""

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


@dataclass(frozen=True)
class Block:
    """Some stored rows of a weight, merged."""

    rows: slice
    before: Tensor
    exact: Tensor
    """float64, before it is rounded"""


def merged_blocks(
    read: Callable[[slice], Tensor], shape: tuple[int, int], kind: Kind, updates: Sequence[Update]
) -> Iterator[Block]:
    """The weight in blocks of stored rows, from the first to the last. Memory is one block and the factors.

    ``read``: rows of the stored weight; ``shape``: as stored, (out, in) or for a transposed kind (in, out).
    """
    wide = [(u, {name: tensor.double() for name, tensor in u.tensors.items()}) for u in updates]
    num_rows = max(1, BLOCK_ELEMENTS // max(1, shape[1]))
    for start in range(0, shape[0], num_rows):
        rows = slice(start, min(start + num_rows, shape[0]))
        before = read(rows)
        total = before.double()
        for update, tensors in wide:
            A, B = tensors["lora_A"], tensors["lora_B"]
            if kind.transposed:
                part = {**tensors, "lora_A": A[:, rows]}
                total = METHODS[update.method].merge(total.T, part, update.scale).T
            else:
                total = METHODS[update.method].merge(total, {**tensors, "lora_B": B[rows]}, update.scale)
        yield Block(rows, before, total)


def merged_weight(W: Tensor, kind: Kind, updates: Sequence[Update], dtype: torch.dtype) -> Tensor:
    """A whole stored weight with its updates, on W's device: the float64 sum rounded once to ``dtype``."""
    merged = torch.empty_like(W, dtype=dtype)
    on = [Update(u.method, u.scale, {name: t.to(W.device) for name, t in u.tensors.items()}) for u in updates]
    for block in merged_blocks(lambda rows: W[rows], (W.shape[0], W.shape[1]), kind, on):
        merged[block.rows] = block.exact.to(dtype)
    return merged
