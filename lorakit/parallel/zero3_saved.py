"""Autograd keeps a frozen weight's name for backward, not the gathered copy of it.

Forward saves weights for backward. Under ZeRO-3 a layer's weights are released after its forward and gathered again
before its backward; a saved copy would keep every gathered layer, the whole base, in memory in between. Vectors are
kept as copies: what a norm gave is made again before the norm's own backward (ops/recompute.py).
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

SMALL: Final = 100_000
"""Elements of a vector that is kept as it is."""


@dataclass(frozen=True)
class _Place:
    """A view of a partitioned parameter, to be taken from it when it is whole again."""

    parameter: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def save_weights_by_reference() -> AbstractContextManager[None]:
    """Around forward and backward of a micro-batch."""
    hooks: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)
    return hooks


def _pack(saved: Tensor) -> Tensor | _Place:
    owner: Any = saved if hasattr(saved, "ds_id") else saved._base
    if owner is None or not hasattr(owner, "ds_id") or owner.ds_persist:
        return saved
    if saved.dim() == 1 and saved.numel() <= SMALL:
        return saved.detach().clone()
    return _Place(owner, tuple(saved.size()), tuple(saved.stride()), int(saved.storage_offset()))


_pack.unpacks_repeatedly = True  # type: ignore[attr-defined] # but for what is away until its layer's backward


def _unpack(kept: Tensor | _Place) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    whole: Tensor = kept.parameter.data
    if whole.numel() != kept.parameter.ds_numel:
        raise RuntimeError(f"parameter {tuple(kept.parameter.ds_shape)} was not gathered for backward")
    return whole.as_strided(kept.size, kept.stride, kept.offset)
