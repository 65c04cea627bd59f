"""Read a rank's rows or columns of a base's parameters, where every rank has a part of each.

Invariant: beside the part, a piece of PIECE_BYTES of the files is in memory.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lorakit.base.lazy import PIECE_BYTES, LazyBase


@dataclass(frozen=True)
class CutDim:
    """A dimension that ranks divide. pieces: tensors of one size side by side in it, such as gate and up."""

    dim: int
    pieces: int = 1

    def cut(self, shape: tuple[int, ...], part_of: Callable[[int], range]) -> "Cut":
        """Return the cut of a tensor of this shape. part_of: the rank's part of so many rows or columns."""
        return Cut(self.dim, part_of(shape[self.dim] // self.pieces), shape, self.pieces)


@dataclass(frozen=True)
class Cut:
    """A part of a tensor of this shape, of each piece: ``Cut(1, range(3), shape, 2)`` is rows 0 to 2 of gate and up."""

    dim: int
    part: range
    shape: tuple[int, ...]
    pieces: int = 1

    @property
    def size(self) -> int:
        """Rows or columns of a full piece."""
        return self.shape[self.dim] // self.pieces

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return (*self.shape[: self.dim], self.pieces * len(self.part), *self.shape[self.dim + 1 :])

    def scatter(self, full: Tensor) -> Tensor:
        """Return the part of a full tensor, in memory of its own."""
        pieces: Tensor = full.unflatten(self.dim, (self.pieces, self.size))
        own = pieces.narrow(self.dim + 1, self.part.start, len(self.part))
        return own.flatten(self.dim, self.dim + 1).clone(memory_format=torch.contiguous_format)

    def gather(self, part: Tensor, side_by_side: Callable[[Tensor, int, int], Tensor]) -> Tensor:
        """Undo `scatter`. side_by_side: (part, dimension, size) -> the ranks' parts, one behind the other."""
        pieces = part.unflatten(self.dim, (self.pieces, len(self.part)))
        full: Tensor = side_by_side(pieces, self.dim + 1, self.size)
        return full.flatten(self.dim, self.dim + 1)


@final
class CutTensors:
    """The ``LazyBase`` of a cut model: ``fill`` counts the elements of parts."""

    def __init__(self, weights: LazyBase, cuts: Mapping[str, Cut]) -> None:
        self._weights = weights
        self._cuts = cuts

    def fill(self, name: str, start: int, out: Tensor) -> None:
        """Fill a contiguous tensor with the elements of a flattened part from ``start`` on."""
        cut = self._cuts.get(name)
        if cut is None:
            self._weights.fill(name, start, out)
        elif cut.dim == len(cut.shape) - 1 > 0:
            self._fill_columns(name, cut, start, out.detach().view(-1))
        else:
            self._fill_rows(name, cut, start, out.detach().view(-1))

    def _fill_rows(self, name: str, cut: Cut, start: int, out: Tensor) -> None:
        """Read the rows of each piece as one range: one for a matrix, one for gate and one for up of each expert."""
        row = math.prod(cut.shape[cut.dim + 1 :])
        full = cut.size * row
        own = len(cut.part) * row
        done = 0
        while done < len(out):
            piece, skip = divmod(start + done, own)
            count = min(own - skip, len(out) - done)
            self._weights.fill(name, piece * full + cut.part.start * row + skip, out[done : done + count])
            done += count

    def _fill_columns(self, name: str, cut: Cut, start: int, out: Tensor) -> None:
        """Read full rows in pieces, because a read for the part of each row would be a call for each row."""
        width = cut.size
        own = len(cut.part)
        step = max(1, PIECE_BYTES // (width * out.element_size()))
        first = start // own
        last = -(-(start + len(out)) // own)
        done = 0
        skip = start - first * own
        for row in range(first, last, step):
            rows = min(step, last - row)
            piece = torch.empty(rows * width, dtype=out.dtype)
            self._weights.fill(name, row * width, piece)
            columns = piece.view(rows, width)[:, cut.part.start : cut.part.stop].reshape(-1)[skip:]
            count = min(len(columns), len(out) - done)
            out[done : done + count].copy_(columns[:count])
            done = done + count
            skip = 0
