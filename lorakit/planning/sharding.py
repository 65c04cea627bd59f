"""Parts of tensors, as engines cut them, and their bytes."""

import math
from collections.abc import Callable

from lorakit.planning.model_shapes import Piece, Shapes

Part = Callable[[Piece, int], int]
"""(tensor, N) -> bytes of rank 0's part of it, the largest"""


def whole(piece: Piece, num_ranks: int) -> int:
    """A tensor as it is."""
    return piece.nbytes


def flat_part(piece: Piece, num_ranks: int) -> int:
    """ceil(elements / N): the flattened tensor in equal parts."""
    return math.ceil(piece.numel / num_ranks) * piece.itemsize


def rows_part(piece: Piece, num_ranks: int) -> int:
    """ceil(rows / N) rows."""
    return math.ceil(piece.shape[0] / num_ranks) * math.prod(piece.shape[1:]) * piece.itemsize


def whole_and_part(piece: Piece, num_ranks: int) -> int:
    """The tensor, and this rank's part of it beside."""
    return piece.nbytes + flat_part(piece, num_ranks)


def sum_of(pieces: tuple[Piece, ...], part: Part, num_ranks: int) -> int:
    """Bytes of the parts of several tensors."""
    return sum(part(piece, num_ranks) for piece in pieces)


def adapter_bytes(shapes: Shapes) -> int:
    """A."""
    return sum_of(shapes.adapter, whole, 1)


def base_bytes(shapes: Shapes) -> int:
    """P."""
    return sum_of(shapes.frozen, whole, 1)
