"""Read a rank's rows or columns of a base's parameters, where every rank has a part of each.

Invariant: beside the part, a piece of PIECE_BYTES of the files is in memory.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lorakit.base.lazy import PIECE_BYTES, LazyBase
from lorakit.base.quantized import QuantizedTensors
from lorakit.quant.bnb import QuantizationInfo
from lorakit.quant.parts import cut_quantized


@dataclass(frozen=True)
class Cut:
    """A part of a tensor: ``part`` of its rows (dim 0) or columns (dim 1). shape: of the full tensor."""

    dim: int
    part: range
    shape: tuple[int, ...]

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return (*self.shape[: self.dim], len(self.part), *self.shape[self.dim + 1 :])

    def of(self, full: Tensor) -> Tensor:
        """Return the part of a full tensor, in memory of its own."""
        return full.narrow(self.dim, self.part.start, len(self.part)).clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class QuantizedCut:
    """A part of a quantised weight. full: its facts before it was cut."""

    dim: int
    part: range
    full: QuantizationInfo


@final
class CutTensors:
    """The ``LazyBase`` of a model whose parameters are cut: ``fill`` counts the elements of the parts.

    quantized: by the names of the layers.
    """

    def __init__(
        self, weights: LazyBase, cuts: Mapping[str, Cut], quantized: Mapping[str, QuantizedCut] | None = None
    ) -> None:
        self._weights, self._cuts, self._quantized = weights, cuts, quantized or {}
        self._last: tuple[str, dict[str, Tensor]] = ("", {})

    def fill(self, name: str, start: int, out: Tensor) -> None:
        """Fill a contiguous tensor with the elements of a flattened part from ``start`` on."""
        module, _, key = name.rpartition(".")
        cut = self._cuts.get(name)
        if module in self._quantized and key != "bias":
            flat = self._tensors_of(module)[key].reshape(-1)
            out.detach().view(-1).copy_(flat[start : start + out.numel()])
        elif cut is None:
            self._weights.fill(name, start, out)
        elif cut.dim == 0:
            row = math.prod(cut.shape[1:])
            self._weights.fill(name, cut.part.start * row + start, out)
        else:
            self._fill_columns(name, cut, start, out.detach().view(-1))

    def read_weight(self, name: str) -> Tensor:
        """Return a full parameter, of which this rank has a part."""
        return self._weights.read_weight(name)

    def _tensors_of(self, module: str) -> dict[str, Tensor]:
        """Return the tensors of a quantised layer's part; those of the last layer stay, as in `QuantizedTensors`."""
        if self._last[0] != module:
            assert isinstance(self._weights, QuantizedTensors)
            one = self._quantized[module]
            self._last = ("", {})
            self._last = (module, cut_quantized(self._weights.tensors_of(module), one.full, one.dim, one.part))
        return self._last[1]

    def _fill_columns(self, name: str, cut: Cut, start: int, out: Tensor) -> None:
        """Read full rows in pieces, because a read for the part of each row would be a call for each row."""
        width, own = cut.shape[1], len(cut.part)
        step = max(1, PIECE_BYTES // (width * out.element_size()))
        first, last = start // own, -(-(start + len(out)) // own)
        done, skip = 0, start - first * own
        for row in range(first, last, step):
            rows = min(step, last - row)
            piece = torch.empty(rows * width, dtype=out.dtype)
            self._weights.fill(name, row * width, piece)
            columns = piece.view(rows, width)[:, cut.part.start : cut.part.stop].reshape(-1)[skip:]
            count = min(len(columns), len(out) - done)
            out[done : done + count].copy_(columns[:count])
            done, skip = done + count, 0
