"""Bytes of an optimizer's state, tensor by tensor, and where they are."""

import math
from dataclasses import dataclass
from typing import Final

from lorakit.planning.model_shapes import ModelShapes, TensorShape
from lorakit.planning.sharding import ShardRule

FLOATS_BELOW: Final = 4096  # elements: the moments of a smaller tensor stay float32
BLOCK: Final = 256  # values that share a scale
TABLES_BYTES: Final = 2 * 256 * 4  # what the codes of each moment stand for, once
PAGED_FROM: Final = 100_000  # elements: the moments of a smaller tensor are not paged
COUNTER_BYTES: Final = 4


@dataclass(frozen=True)
class OptimizerStateBytes:
    """Bytes of the state of some tensors: what stays where it is computed, and what gives way to the host's memory."""

    stays: int
    paged: int = 0


def state_of(name: str, shapes: ModelShapes, part: ShardRule, num_ranks: int, num_counters: int) -> OptimizerStateBytes:
    """Of rank 0 under the optimizer of a recipe's name; all but ``adamw`` hold whole tensors and count in Python."""
    if name == "adamw":
        return OptimizerStateBytes(
            sum(2 * part(piece, num_ranks) for piece in shapes.adapter) + COUNTER_BYTES * num_counters
        )
    eight, paged = name.endswith("8bit"), name.startswith("paged")
    sizes = [(piece.numel >= PAGED_FROM and paged, _moments(piece, eight=eight)) for piece in shapes.adapter]
    tables = TABLES_BYTES if eight and any(piece.numel >= FLOATS_BELOW for piece in shapes.adapter) else 0
    return OptimizerStateBytes(
        sum(size for out, size in sizes if not out) + tables, sum(size for out, size in sizes if out)
    )


def _moments(piece: TensorShape, *, eight: bool) -> int:
    """Two moments: in 8 bits with a float32 scale for each block, or in float32."""
    if eight and piece.numel >= FLOATS_BELOW:
        return 2 * (piece.numel + 4 * math.ceil(piece.numel / BLOCK))
    return 2 * 4 * piece.numel
