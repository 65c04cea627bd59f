"""A patch: an adapter on disk, in PEFT's own files, knowing its base.

The folder is a patch when it holds ``adapter_config.json``; that file is written last and removed first, so no half
patch is ever visible. lorakit's facts (base fingerprint, recipe, digests, versions) are in the tensor file's metadata.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from lorakit.errors import PatchError
from lorakit.lora.methods import METHODS
from lorakit.patch.adapter_config import PatchConfig

TENSOR_FILE: Final = "adapter_model.safetensors"
SIDECAR: Final = "lorakit.json"
FLOATS: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Caps:
    """How much a patch may ask for; looked at before anything is allocated."""

    header_bytes: int = 32 << 20
    """of the tensor file's header, and of adapter_config.json"""
    file_bytes: int = 64 << 30
    rank: int = 8192


DEFAULT_CAPS: Final = Caps()


@dataclass(frozen=True)
class PatchLayer:
    """One layer's update: A (r, in), B (out, r) and the numbers that give s.

    An embedding is a linear layer on one-hot vectors: A (r, vocabulary), B (width, r).
    """

    method: str
    rank: int
    alpha: float
    sizes: tuple[int, int]
    """(out, in)"""
    tensors: Mapping[str, Tensor]
    embedding: bool = False
    num_experts: int = 0
    """of a 3-D parameter: A (E r, in) is (E, r, in), B (out, r E) is (out, r, E); 0 for a matrix"""

    @property
    def num_parameters(self) -> int:
        magnitude = 0 if METHODS[self.method].additive else self.sizes[0]
        return self.rank * sum(self.sizes) * max(1, self.num_experts) + magnitude

    @property
    def plain(self) -> bool:
        """Whether it is W + s B A of one matrix and nothing else."""
        return not self.num_experts and METHODS[self.method].additive

    @property
    def scale(self) -> float:
        return METHODS[self.method].scale(self.alpha, self.rank)


@dataclass(frozen=True)
class TokenRows:
    """Rows of an embedding, and of the head that is tied to it."""

    tokens: tuple[int, ...]
    tensor: Tensor
    """(tokens, width)"""


@dataclass(frozen=True)
class Patch:
    """A whole adapter on the CPU: updates by module name, and whole tensors that take the place of the base's."""

    folder: Path
    config: PatchConfig
    layers: Mapping[str, PatchLayer]
    full_tensors: Mapping[str, Tensor]
    """by parameter name, such as ``lm_head.weight``"""
    whole_shapes: Mapping[str, tuple[int, ...]]
    copies: Mapping[str, Tensor] = field(default_factory=dict)
    """by key: what PEFT writes beside whole tensors and does not use; kept so that nothing is lost in a round trip"""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    token_rows: Mapping[str, TokenRows] = field(default_factory=dict)
    """by embedding: rows that take the place of the base's"""
    digest: str | None = None
    """XXH3-128 of the tensor file: which bytes it was, found in milliseconds"""

    @property
    def num_parameters(self) -> int:
        updates = sum(layer.num_parameters for layer in self.layers.values())
        rows = sum(rows.tensor.numel() for rows in self.token_rows.values())
        return updates + rows + sum(torch.Size(shape).numel() for shape in self.whole_shapes.values())

    @property
    def made_for(self) -> str:
        return self.config.base_model or "a base without a name"


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is an infinity or not a number.

    A sum that is finite says so in the fastest pass over them; one that is not may only be too large, and then the
    extremes tell.
    """
    if not tensor.numel() or bool(tensor.sum(dtype=torch.float32).isfinite()):
        return True
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def check_finite(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Passes when none of these, by their names, holds an infinity or what is not a number.

    Raises:
        PatchError: one does, which is about to be saved.
    """
    for name, tensor in tensors:
        if not is_finite(tensor):
            raise PatchError(f"{name} holds values that are not finite; nothing was saved")


def check_plain(patch: Patch, what: str) -> None:
    """Passes when every update is W + s B A of one matrix, and no rows come with them.

    Raises:
        PatchError: it is more than that, which ``what`` does not do.
    """
    more = [f"{name} ({layer.method})" for name, layer in patch.layers.items() if not layer.plain] + list(
        patch.token_rows
    )
    if more:
        raise PatchError(
            f"{patch.folder}: {what} works on plain low-rank updates; this patch holds {len(more)} others,"
            f" {more[0]} first. Merge it into its base (lorakit merge)"
        )
