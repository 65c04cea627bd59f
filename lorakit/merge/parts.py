"""What a merged model is made of: patches with weights, what each does to a tensor, and the tensors."""

from dataclasses import dataclass
from pathlib import Path

import torch

from lorakit.lora.kinds import Kind
from lorakit.lora.merging import Update
from lorakit.patch import Patch
from lorakit.patch.tensor_file import TensorFile

MERGEABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Weighted:
    """A patch and the weight of its update in the sum."""

    number: int
    folder: Path
    patch: Patch
    weight: float


@dataclass(frozen=True)
class Part:
    """What one patch does to one tensor: an update, or a whole tensor in its place."""

    of: Weighted
    place: str
    """the module of an update, the parameter of a whole tensor"""

    def update(self) -> Update:
        """The update, read from the patch now."""
        layer = self.of.patch.layers[self.place]
        return Update(layer.method, layer.scale * self.of.weight, dict(layer.tensors))


@dataclass(frozen=True)
class Piece:
    """One tensor of the merged model and what it is made of; without parts it is copied, or converted."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: TensorFile
    stored: str
    """the base's tensor it starts from"""
    kind: Kind | None = None
    updates: tuple[Part, ...] = ()
    wholes: tuple[Part, ...] = ()

    @property
    def copied(self) -> bool:
        """Whether its bytes are the base's."""
        entry = self.file.entries[self.stored]
        return not self.updates and not self.wholes and (entry.dtype, entry.shape) == (self.dtype, self.shape)
