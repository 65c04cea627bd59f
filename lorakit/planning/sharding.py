"""Parts of tensors, as engines cut them, and their bytes."""

import math
from collections.abc import Callable

from lorakit.planning.model_shapes import ModelShapes, TensorShape

ShardRule = Callable[[TensorShape, int], int]
"""(tensor, N) -> bytes of rank 0's part of it, the largest"""


def whole(piece: TensorShape, num_ranks: int) -> int:
    """A tensor as it is."""
    return piece.nbytes


def flat_shard(piece: TensorShape, num_ranks: int) -> int:
    """ceil(elements / N): the flattened tensor in equal parts."""
    return math.ceil(piece.numel / num_ranks) * piece.itemsize


def row_shard(piece: TensorShape, num_ranks: int) -> int:
    """ceil(rows / N) rows."""
    return math.ceil(piece.shape[0] / num_ranks) * math.prod(piece.shape[1:]) * piece.itemsize


def whole_and_part(piece: TensorShape, num_ranks: int) -> int:
    """The tensor, and this rank's part of it beside."""
    return piece.nbytes + flat_shard(piece, num_ranks)


def sum_of(pieces: tuple[TensorShape, ...], part: ShardRule, num_ranks: int) -> int:
    """Bytes of the parts of several tensors."""
    return sum(part(piece, num_ranks) for piece in pieces)


def adapter_bytes(shapes: ModelShapes) -> int:
    """A."""
    return sum_of(shapes.adapter, whole, 1)


def base_bytes(shapes: ModelShapes) -> int:
    """P."""
    return sum_of(shapes.frozen, whole, 1)
