"""The tensors of a merged model, and the parts of patches that change them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lorakit.base.meta import load_on_meta
from lorakit.base.provenance import StoredTensor, source_of
from lorakit.errors import MergeError
from lorakit.lora.experts import expert_factors
from lorakit.lora.layer_kinds import LINEAR, LayerKind, expert_kind
from lorakit.lora.merge_weight import LowRankUpdate, RowMerger, RowsUpdate, WeightChange
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

    def note(stored: StoredTensor, out: Tensor, start: int) -> None:
        offset = out.storage_offset()
        size = torch.Size(stored.shape).numel()
        # concatenated sources fill the meta tensor itself; a recomputed one reads into tensors with data
        full = out.is_meta and start == 0 and out.numel() == size
        if full and len(stored.shape) == 3 and stored.shape == tuple(parameter.shape):
            slices.append(ExpertSlice(stored.name, kind))
        elif full and stored.shape[1:] == (width,) and offset % width == 0:
            expert, first = divmod(offset // width, num_rows)
            slices.append(ExpertSlice(stored.name, kind, expert, slice(first, first + stored.shape[0])))
        else:
            raise MergeError(
                f"{folder}: {name} is put together from {stored.name} in a way that a merge cannot undo; keep the patch"
                " as an adapter"
            )

    source = source_of(parameter)
    assert source is not None  # load_on_meta refuses a parameter without one
    source.fill(torch.empty(parameter.numel(), device="meta"), 0, note)
    return slices


@dataclass(frozen=True)
class Contribution:
    """One patch's part in one tensor: an update, token rows, or a full tensor."""

    source: WeightedPatch
    name: str  # the module of an update or of token rows; the parameter of experts or of a full tensor
    experts: ExpertSlice | None = None

    def update(self) -> WeightChange:
        """Read the update of a matrix from the patch."""
        if (rows := self.source.patch.token_rows.get(self.name)) is not None:
            return RowsUpdate(rows.tokens, rows.tensor, self.source.weight)
        if self.experts is not None and self.experts.expert is not None:
            return self.expert_update(self.experts.expert)
        layer = self.source.patch.layers[self.name]
        return LowRankUpdate(layer.method, layer.scale, dict(layer.tensors), self.source.weight)

    def expert_update(self, expert: int) -> LowRankUpdate:
        """Read the update of one expert's matrix, restricted to the rows in the tensor."""
        assert self.experts is not None
        layer = self.source.patch.layers[self.name]
        A, B = expert_factors(layer.tensors["lora_A"], layer.tensors["lora_B"], layer.num_experts)
        axis = self.experts.kind.stored_axis
        factors = {"lora_A": A[expert], "lora_B": B[expert]}
        parts = {name: FACTORS[name].part(factor, axis, self.experts.rows) for name, factor in factors.items()}
        return LowRankUpdate(layer.method, layer.scale, parts, self.source.weight)


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


def merge_experts(tensor: OutputTensor, total: Tensor, rows: slice) -> Tensor:
    """Add updates to experts' matrices in float64, a flattened matrix a row, as ``RowMerger`` does to rows of one."""
    for row, expert in enumerate(range(rows.start, rows.stop)):
        updates = [part.expert_update(expert) for part in tensor.updates]
        matrix = total[row].view(tensor.shape[1:])
        total[row] = RowMerger(tensor.kind, updates)(matrix, slice(0, tensor.shape[1])).reshape(-1)
    return total
