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
from lorakit.parallel.group import Group


@dataclass(frozen=True)
class CutDim:
    """A dimension that ranks divide."""

    dim: int
    pieces: int = 1  # tensors of one size side by side in it, such as gate and up
    copies: int = 1  # neighbouring ranks with the same part, as of a head of keys that several ranks' queries read

    def cut(self, shape: tuple[int, ...], group: Group) -> "Cut":
        """Return this rank's cut of a tensor of this shape."""
        parts = Group(group.rank // self.copies, group.size // self.copies)
        return Cut(self.dim, parts.part(shape[self.dim] // self.pieces), shape, self.pieces, self.copies)


@dataclass(frozen=True)
class Cut:
    """A part of a tensor of this shape, of each piece: ``Cut(1, range(3), shape, 2)`` is rows 0 to 2 of gate and up."""

    dim: int
    part: range
    shape: tuple[int, ...]
    pieces: int = 1
    copies: int = 1

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
        full: Tensor = side_by_side(pieces, self.dim + 1, self.copies * self.size)
        if self.copies > 1:  # every part is there so many times
            full = full.unflatten(self.dim + 1, (-1, self.copies, len(self.part)))
            full = full.select(self.dim + 2, 0).flatten(self.dim + 1, self.dim + 2)
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
            return
        out = out.detach().view(-1)
        # the part has the same range of each line: of a row, if columns are cut, else of a piece, row by row
        stride = math.prod(cut.shape[cut.dim + 1 :])
        width = cut.size * stride
        own = len(cut.part) * stride
        skip = cut.part.start * stride
        # full rows, several at once, because a read for the part of each row would be a call for each row
        reads_rows = cut.dim == len(cut.shape) - 1 > 0
        step = max(1, PIECE_BYTES // (width * out.element_size())) if reads_rows else 1
        last = -(-(start + len(out)) // own)
        for line in range(start // own, last, step):
            stop = min(line + step, last)
            low = max(start, line * own)
            part = out[low - start : stop * own - start]
            if reads_rows:
                rows = torch.empty(stop - line, width, dtype=out.dtype)
                self._weights.fill(name, line * width, rows)
                columns = rows[:, skip : skip + own].reshape(-1)
                part.copy_(columns[low - line * own :][: len(part)])
            else:
                self._weights.fill(name, line * width + skip + low - line * own, part)
