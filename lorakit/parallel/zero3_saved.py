"""Under ZeRO-3, save a reference to a frozen weight for backward instead of its gathered copy.

Autograd saves weights in forward. DeepSpeed frees a layer's weights after its forward and gathers them once more
before its backward. A saved copy would keep the full base in memory in between. 1-D weights (norms) are saved as
copies, because ops/recompute.py recomputes a norm's output before that norm's weights are gathered.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from lorakit.parallel._internals import base_of_view, full_shape, is_persistent, is_zero3_parameter

MAX_COPIED_ELEMENTS: Final = 100_000  # of a 1-D weight


@dataclass(frozen=True)
class _WeightReference:
    """A view of a sharded parameter, to be made once the parameter is gathered. Sizes are in elements."""

    parameter: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def save_weights_by_reference() -> AbstractContextManager[None]:
    """Return a context that saves frozen weights by reference. Needed around a micro-batch's forward and backward."""
    hooks: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)
    return hooks


def _pack(saved: Tensor) -> Tensor | _WeightReference:
    """Return what autograd stores for a saved tensor. A view of a weight, such as W.T, is traced to its parameter."""
    parameter = saved if is_zero3_parameter(saved) else base_of_view(saved)
    if parameter is None or not is_zero3_parameter(parameter) or is_persistent(parameter):
        return saved
    if saved.dim() == 1 and saved.numel() <= MAX_COPIED_ELEMENTS:
        return saved.detach().clone()
    return _WeightReference(parameter, tuple(saved.size()), tuple(saved.stride()), int(saved.storage_offset()))


# ops/recompute.py reads this: other hooks, such as activation checkpointing's, unpack each tensor only once
_pack.unpacks_repeatedly = True  # type: ignore[attr-defined]


def _unpack(saved: Tensor | _WeightReference) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    gathered: Tensor = saved.parameter.data
    shape = full_shape(saved.parameter)
    if gathered.numel() != shape.numel():  # as_strided over a freed weight would read other memory
        raise RuntimeError(f"parameter {tuple(shape)} was not gathered for backward")
    return gathered.as_strided(saved.shape, saved.stride, saved.offset)
