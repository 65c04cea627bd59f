"""A patch: an adapter on disk, in PEFT's own files, with a fingerprint of its base.

A folder is a patch if it has ``adapter_config.json``. That file is written last and removed first, so no half patch is
ever visible. lorakit's own facts (base fingerprint, recipe, digests, versions) are in the tensor file's metadata.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from lorakit.errors import PatchError
from lorakit.lora.experts import expert_factors
from lorakit.lora.low_rank import LowRankFit
from lorakit.lora.merge_weight import LowRankUpdate
from lorakit.lora.methods import METHODS, PLAIN
from lorakit.patch.adapter_config import PatchConfig
from lorakit.patch.pooling import Pooling

TENSOR_FILE: Final = "adapter_model.safetensors"
SIDECAR: Final = "lorakit.json"
FLOATS: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
MAX_RANK: Final = 8192


@dataclass(frozen=True)
class PatchLayer:
    """One layer's update: A (r, in), B (out, r), rank and alpha. An embedding has A (r, vocabulary), B (width, r)."""

    method: str
    rank: int
    alpha: float
    sizes: tuple[int, int]  # (out, in)
    tensors: Mapping[str, Tensor] = field(repr=False)  # by name: those of the method that files hold
    embedding: bool = False
    num_experts: int = 0
    """E of a 3-D parameter, whose A (E r, in) is stacked (E, r, in) and B (out, r E) is (out, r, E); 0 for a matrix"""

    @property
    def plain(self) -> bool:
        """True if the update is W + s B A of one matrix and nothing else."""
        return not self.num_experts and METHODS[self.method].additive

    @property
    def scale(self) -> float:
        return METHODS[self.method].scale(self.alpha, self.rank)

    def updates(self, weight: float = 1.0) -> list[LowRankUpdate]:
        """Read the update of each matrix: one, or one for each expert. weight: factor on it."""
        tensors = [dict(self.tensors)]
        if self.num_experts:
            pairs = zip(*expert_factors(tensors[0]["lora_A"], tensors[0]["lora_B"], self.num_experts), strict=True)
            tensors = [{"lora_A": A, "lora_B": B} for A, B in pairs]
        return [LowRankUpdate(self.method, self.scale, own, weight) for own in tensors]


def low_rank_layer(fit: LowRankFit, *, embedding: bool) -> PatchLayer:
    """Return the update s B A as a layer of the plain method."""
    factors = fit.factors
    sizes = (len(factors.B), factors.A.shape[1])
    tensors = {"lora_A": factors.A, "lora_B": factors.B}
    return PatchLayer(PLAIN, factors.rank, fit.s * factors.rank, sizes, tensors, embedding)


@dataclass(frozen=True)
class TokenRows:
    """Trained rows of an embedding, and of the head that is tied to it."""

    tokens: tuple[int, ...]  # token ids
    tensor: Tensor = field(repr=False)  # (tokens, width)


@dataclass(frozen=True, repr=False)
class Patch:
    """An adapter on the CPU: updates by module name, and full tensors that replace the base's."""

    folder: Path
    config: PatchConfig
    layers: Mapping[str, PatchLayer]  # by module name
    full_tensors: Mapping[str, Tensor]  # by parameter name, such as ``lm_head.weight``
    full_shapes: Mapping[str, tuple[int, ...]]
    bias_scales: Mapping[str, float] = field(default_factory=dict)  # bias -> s: the full tensor b means b0 + s b
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """lorakit's own facts; empty for a patch of another program"""
    token_rows: Mapping[str, TokenRows] = field(default_factory=dict)  # by embedding: rows that replace the base's
    pooling: Pooling | None = None  # of a patch of embeddings
    misnamed: str | None = None  # a key of the file that other programs do not look for, such as `module.base_model...`
    digest: str | None = None  # XXH3-128 of the tensor file's bytes; None for a patch that was not read from a file
    num_bytes: int = 0  # of the tensors in that file

    @property
    def new_tokens(self) -> Mapping[str, int]:
        """Id of each token that the base does not have, by its text, in the order of the ids."""
        return dict(sorted(self.metadata.get("new_tokens", {}).items(), key=lambda item: item[1]))

    def num_added_rows(self, num_rows: int) -> int:
        """Return the number of new tokens behind the rows of a base's embedding; the others are in its spare rows."""
        return sum(token >= num_rows for token in self.new_tokens.values())

    def with_full_tensors(self, names: Iterable[str]) -> "Patch":
        """Return the patch with these of its full tensors alone."""
        shapes = {name: self.full_shapes[name] for name in names}
        return replace(self, full_shapes=shapes, full_tensors={name: self.full_tensors[name] for name in shapes})

    @property
    def identity(self) -> str | None:
        """Digest of the tensors and of the settings: two patches of one identity are one adapter. None as `digest`."""
        if self.digest is None:
            return None
        settings = json.dumps(dict(self.config.raw), sort_keys=True)
        pooling = "" if self.pooling is None else f" {self.pooling}"
        return hashlib.blake2b(f"{self.digest} {settings}{pooling}".encode(), digest_size=16).hexdigest()

    @property
    def num_parameters(self) -> int:
        shapes = [*self.full_shapes.values(), *(rows.tensor.shape for rows in self.token_rows.values())]
        for layer in self.layers.values():
            rank = layer.rank * max(1, layer.num_experts)
            shapes += METHODS[layer.method].stored_shapes(layer.sizes, rank).values()
        return sum(map(math.prod, shapes))

    def __repr__(self) -> str:
        ranks = ", ".join(str(rank) for rank in sorted({layer.rank for layer in self.layers.values()}))
        size = f"rank {ranks or 'none'}, {len(self.layers)} layers, {self.num_parameters:,} parameters"
        return f"Patch({str(self.folder)!r}: {self.config.method}, {size}, for {self.made_for})"

    @property
    def made_for(self) -> str:
        return self.config.base_model or "a base without a name"


def is_finite(tensor: Tensor) -> bool:
    """True if no value is infinite or NaN."""
    # the sum first, because it is the fastest pass; an infinite sum may be an overflow, so the extremes decide then
    if not tensor.numel() or bool(tensor.sum(dtype=torch.float32).isfinite()):
        return True
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def check_finite(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise PatchError if one of these tensors, which are about to be saved, has an infinite value or NaN."""
    for name, tensor in tensors:
        if not is_finite(tensor):
            raise PatchError(f"{name} holds values that are not finite; nothing was saved")


def check_plain(patch: Patch, operation: str) -> None:
    """Raise PatchError, which names the ``operation``, unless updates are s B A of one matrix, or full tensors."""
    if patch.pooling is not None:
        raise PatchError(f"{patch.folder}: {operation} loses how embeddings are pooled; keep it as it is, or merge it")
    others = [f"{name} ({layer.method})" for name, layer in patch.layers.items() if not layer.plain]
    others += [*patch.token_rows, *patch.bias_scales]
    if others:
        reason = f"this patch holds {len(others)} others, {others[0]} first. Merge it into its base (lorakit merge)"
        raise PatchError(f"{patch.folder}: {operation} works on plain low-rank updates; {reason}")
