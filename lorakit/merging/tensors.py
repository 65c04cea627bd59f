"""The tensors of a merged model, and the parts of patches that change them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from lorakit.base.meta import load_on_meta
from lorakit.base.provenance import source_of, stored_parts
from lorakit.errors import MergeError
from lorakit.lora.layer_kinds import LINEAR, LayerKind, expert_kind
from lorakit.lora.merge_weight import RowsUpdate, WeightChange
from lorakit.lora.methods import FACTORS
from lorakit.merging.readers import WeightReader
from lorakit.patch.find import WeightedPatch


@dataclass(frozen=True)
class ExpertSlice:
    """The part of a 3-D parameter that one stored tensor holds: all of it, or rows of one expert's matrix."""

    stored: str
    kind: LayerKind  # of one expert's matrix
    expert: int | None = None  # index of the expert; None: all experts
    rows: slice = field(default_factory=lambda: slice(None))  # rows of the expert's matrix


def expert_slices(folder: Path, names: Iterable[str]) -> dict[str, list[ExpertSlice]]:
    """Return the stored tensors of each 3-D parameter, or router's weight. Raises MergeError unless concatenated."""
    model = load_on_meta(folder, torch.float32)
    return {name: _slices(folder, name, model) for name in names}


def _slices(folder: Path, name: str, model: torch.nn.Module) -> list[ExpertSlice]:
    parameter = model.get_parameter(name)
    kind = expert_kind(model.get_submodule(name.rpartition(".")[0]))
    num_rows, width = parameter.shape[-2:]
    slices = []
    source = source_of(parameter)
    assert source is not None  # load_on_meta refuses a parameter without one
    for stored, offset in stored_parts(source):
        if offset is not None and len(stored.shape) == 3 and stored.shape == tuple(parameter.shape):
            slices.append(ExpertSlice(stored.name, kind))
        elif offset is not None and stored.shape[1:] == (width,) and offset % width == 0:
            expert, first = divmod(offset // width, num_rows)
            slices.append(ExpertSlice(stored.name, kind, expert, slice(first, first + stored.shape[0])))
        else:
            raise MergeError(f"{folder}: {name} is put together from {stored.name} so that no merge can undo it")
    return slices


@dataclass(frozen=True)
class Contribution:
    """One patch's part in one tensor: an update, token rows, or a full tensor."""

    source: WeightedPatch
    name: str  # the module of an update or of token rows; the parameter of experts or of a full tensor
    experts: ExpertSlice | None = None

    def updates(self) -> Sequence[WeightChange]:
        """Read the update of each matrix in the tensor from the patch."""
        patch = self.source.patch
        if (rows := patch.token_rows.get(self.name)) is not None:
            return [RowsUpdate(rows.tokens, rows.tensor, self.source.weight)]
        updates = patch.layers[self.name].updates(self.source.weight)
        if self.experts is None or self.experts.expert is None:
            return updates
        own = updates[self.experts.expert]
        axis = self.experts.kind.stored_axis
        parts = {name: FACTORS[name].part(factor, axis, self.experts.rows) for name, factor in own.tensors.items()}
        return [replace(own, tensors=parts)]


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the merged model and its parts; without parts the base's tensor is copied, or converted."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    base: WeightReader
    stored: str  # the base's tensor that the parts are added to
    kind: LayerKind = LINEAR  # of the layer whose weight this is, or of one expert's matrix
    updates: tuple[Contribution, ...] = ()
    full_tensors: tuple[Contribution, ...] = ()

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.base.entries[self.stored].shape

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize
