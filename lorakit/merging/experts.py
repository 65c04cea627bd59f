"""Where the matrices of experts lie in a base's files: one tensor for all, or one for each, or for halves of each."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lorakit.base.lazy import load_on_meta
from lorakit.base.provenance import ORIGIN, StoredTensor
from lorakit.errors import MergeError
from lorakit.lora.experts import is_transposed


@dataclass(frozen=True)
class ExpertPlace:
    """A stored tensor that holds a 3-D parameter, or rows of one expert's matrix in it."""

    stored: str
    transposed: bool
    """whether its rows are the matrix's inputs"""
    expert: int | None = None
    """None: it holds all of them"""
    rows: slice = field(default_factory=lambda: slice(None))


def expert_places(folder: Path, names: Iterable[str]) -> dict[str, list[ExpertPlace]]:
    """3-D parameter -> the stored tensors it is made of.

    Raises:
        MergeError: they are not simply laid one after the other. BaseModelError: the base cannot be read in parts.
    """
    model = load_on_meta(folder, torch.float32)
    return {name: _places(folder, name, model) for name in names}


def _places(folder: Path, name: str, model: torch.nn.Module) -> list[ExpertPlace]:
    parameter = model.get_parameter(name)
    transposed = is_transposed(model.get_submodule(name.rpartition(".")[0]))
    _, num_rows, width = parameter.shape
    found = []

    def note(stored: StoredTensor, out: Tensor, start: int) -> None:
        place, size = out.storage_offset(), torch.Size(stored.shape).numel()
        whole = out.is_meta and start == 0 and out.numel() == size
        if whole and stored.shape == tuple(parameter.shape):
            found.append(ExpertPlace(stored.name, transposed))
        elif whole and stored.shape[1:] == (width,) and place % width == 0:
            expert, first = divmod(place // width, num_rows)
            found.append(ExpertPlace(stored.name, transposed, expert, slice(first, first + stored.shape[0])))
        else:
            raise MergeError(
                f"{folder}: {name} is put together from {stored.name} in a way that a merge cannot undo; keep the patch"
                " as an adapter"
            )

    vars(parameter)[ORIGIN].fill(torch.empty(parameter.numel(), device="meta"), 0, note)
    return found
