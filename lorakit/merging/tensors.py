"""What a merged model is made of: patches with weights, what each does to a tensor, and the tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lorakit.files.safetensors import SafetensorsFile
from lorakit.lora.experts import expert_factors
from lorakit.lora.layer_kinds import CONV1D, LINEAR, LayerKind
from lorakit.lora.merge_weight import RowMerger, Update, norm_of_sum, rows_update
from lorakit.merging.dequantized import dequantized_names
from lorakit.merging.experts import ExpertPlace
from lorakit.patch import Patch

MERGEABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class WeightedPatch:
    """A patch and the weight of its update in the sum."""

    number: int
    folder: Path
    patch: Patch
    weight: float


@dataclass(frozen=True)
class Contribution:
    """What one patch does to one tensor: an update, rows of tokens, or a whole tensor in its place."""

    of: WeightedPatch
    place: str
    """the module of an update or of rows, the parameter of experts or of a whole tensor"""
    expert: ExpertPlace | None = None

    def update(self) -> Update:
        """The update of a matrix, read from the patch now."""
        if self.place in self.of.patch.token_rows:
            rows = self.of.patch.token_rows[self.place]
            return rows_update(rows.tensor, rows.tokens, self.of.weight)
        if self.expert is not None and self.expert.expert is not None:
            return self.update_of(self.expert.expert)
        layer = self.of.patch.layers[self.place]
        return Update(layer.method, layer.scale, dict(layer.tensors), self.of.weight)

    @property
    def stacked(self) -> bool:
        """Whether the tensor holds the matrices of all experts."""
        return self.expert is not None and self.expert.expert is None

    def update_of(self, expert: int) -> Update:
        """The update of one expert's matrix, or of the rows of it that the tensor holds."""
        assert self.expert is not None
        layer = self.of.patch.layers[self.place]
        A, B = expert_factors(layer.tensors["lora_A"], layer.tensors["lora_B"], layer.num_experts)
        rows = self.expert.rows
        own = {
            "lora_A": A[expert][:, rows] if self.expert.transposed else A[expert],
            "lora_B": B[expert] if self.expert.transposed else B[expert][rows],
        }
        return Update(layer.method, layer.scale, own, self.of.weight)


class ExpertMerger:
    """Adds updates to the matrices of experts, which a block holds a row each; as ``RowMerger`` does for rows."""

    needs_all_rows = False

    def __init__(self, parts: Sequence[Contribution], shape: tuple[int, ...]) -> None:
        self._parts, self._shape = parts, shape
        self.squares = [0.0] * len(parts)

    def __call__(self, total: Tensor, rows: slice) -> Tensor:
        for row, expert in enumerate(range(rows.start, rows.stop)):
            updates = [part.update_of(expert) for part in self._parts]
            for number, update in enumerate(updates):
                self.squares[number] += norm_of_sum([update]) ** 2
            assert self._parts[0].expert is not None
            kind = CONV1D if self._parts[0].expert.transposed else LINEAR
            matrix = total[row].view(self._shape[1:])
            total[row] = RowMerger(kind, updates)(matrix, slice(0, self._shape[1])).reshape(-1)
        return total


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the merged model and what it is made of; without parts it is copied, or converted."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: SafetensorsFile
    stored: str
    """the base's tensor it starts from"""
    kind: LayerKind | None = None
    updates: tuple[Contribution, ...] = ()
    wholes: tuple[Contribution, ...] = ()

    @property
    def copied(self) -> bool:
        """Whether its bytes are the base's."""
        entry = self.file.entries[self.stored]
        as_it_is = self.stored not in dequantized_names(self.file) and (entry.dtype, entry.shape) == (
            self.dtype,
            self.shape,
        )
        return as_it_is and not self.updates and not self.wholes
