"""Map 3-D expert parameters to stored tensors: one tensor for all experts, or one for each expert or part of it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lorakit.base.meta import load_on_meta
from lorakit.base.provenance import StoredTensor, source_of
from lorakit.errors import MergeError
from lorakit.lora.experts import expert_kind
from lorakit.lora.layer_kinds import LayerKind


@dataclass(frozen=True)
class ExpertSlice:
    """The part of a 3-D parameter that one stored tensor holds: all of it, or rows of one expert's matrix."""

    stored: str
    kind: LayerKind
    """of one expert's matrix"""
    expert: int | None = None
    """index of the expert; None: all experts"""
    rows: slice = field(default_factory=lambda: slice(None))
    """rows of the expert's matrix"""


def expert_slices(folder: Path, names: Iterable[str]) -> dict[str, list[ExpertSlice]]:
    """Return the stored tensors of each named 3-D parameter, or of a router's weight.

    Raises:
        MergeError: the stored tensors are not concatenated along experts and rows. BaseModelError: the base cannot be
        read in parts.
    """
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
