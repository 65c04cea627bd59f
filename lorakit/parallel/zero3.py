"""ZeRO-3's parameters: shard a base that is on meta, read or write full tensors, and save weights for backward.

Invariant: no rank ever reads a full tensor of the base. DeepSpeed shards a parameter as equal ranges of its flattened
elements, the last ones padded. `partition` reads a rank's range from the base's files.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from lorakit.base.lazy import LazyBase
from lorakit.lora.layer_kinds import QuantizedExperts
from lorakit.objectives.cross_entropy import LossModel
from lorakit.ops._internals import is_zero3_parameter
from lorakit.ops.recompute import save_packed
from lorakit.parallel._internals import base_of_view, full_shape, is_persistent, partition_parameter
from lorakit.parallel.group import Group

MAX_COPIED_ELEMENTS: Final = 100_000  # of a 1-D weight


def partition(loss_model: LossModel, config: dict[str, Any], group: Group, weights: LazyBase | None) -> None:
    """Shard every parameter over the ranks, DeepSpeed's way. `weights` reads this rank's part of those on meta."""
    import deepspeed

    # of the embedding or the first layer; quantised weights are integers, and DeepSpeed's dtype must be a float
    dtype = next(p.dtype for p in loss_model.parameters() if p.is_floating_point() and not p.requires_grad)
    init = deepspeed.zero.Init(config_dict_or_path=config, dtype=dtype, enabled=True)
    for name, parameter in list(loss_model.model.named_parameters()):
        if parameter.is_meta:
            assert weights is not None
            # with values in this rank's range alone: `torch.empty` only reserves addresses for the rest
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
            start, stop = shard_range(parameter.numel(), group)
            if start < stop:
                weights.fill(name, start, values.view(-1)[start:stop])
            # swapped, so that a tied parameter stays one in every module that has it
            torch.utils.swap_tensors(parameter, nn.Parameter(values, requires_grad=parameter.requires_grad))
        if parameter.requires_grad:
            parameter.data = parameter.data.to(init.local_device)
        # gathered with every layer, the adapter would be sent twice for a micro-batch
        partition_parameter(init, parameter, persistent=parameter.requires_grad)
        if parameter.device != init.local_device:
            # the shard was cut on the CPU; the parameter itself, empty until gathered, belongs to the computing device
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=init.local_device)
    for owner in loss_model.modules():
        for experts in (child for child in owner.children() if isinstance(child, QuantizedExperts)):
            for parameter in experts.parameters():  # which are never called, but read by their owner
                deepspeed.zero.register_external_parameter(owner, parameter)


def padded_shard(full: Tensor, group: Group) -> Tensor:
    """Return this rank's shard of a full tensor, flat, with zeros up to the size that it has on every rank."""
    start, stop = shard_range(full.numel(), group)
    padding = math.ceil(full.numel() / group.size) - (stop - start)
    return nn.functional.pad(full.reshape(-1)[start:stop], (0, padding))


def shard_range(num_elements: int, group: Group) -> tuple[int, int]:
    """Return start and end of this rank's shard within the flattened tensor."""
    size = math.ceil(num_elements / group.size)
    start = min(group.rank * size, num_elements)
    return start, min(start + size, num_elements)


def save_weights_by_reference() -> AbstractContextManager[None]:
    """Return a context that saves a reference to a frozen weight for backward instead of its gathered copy.

    Needed around a micro-batch's forward and backward. DeepSpeed frees a layer's weights after its forward and gathers
    them once more before its backward; a saved copy would keep the full base in memory in between. 1-D weights (norms)
    are saved as copies, because ops/recompute.py recomputes a norm's output before that norm's weights are gathered.
    """
    return save_packed(_pack)


def _pack(saved: Tensor) -> Tensor | Callable[[], Tensor]:
    """Return what autograd stores for a saved tensor. A view of a weight, such as W.T, is traced to its parameter."""
    parameter = saved if is_zero3_parameter(saved) else base_of_view(saved)
    if parameter is None or not is_zero3_parameter(parameter) or is_persistent(parameter):
        return saved
    if saved.dim() == 1 and saved.numel() <= MAX_COPIED_ELEMENTS:
        return saved.detach().clone()
    return partial(_view_of, parameter, saved.size(), saved.stride(), int(saved.storage_offset()))


def _view_of(parameter: Any, shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
    """Return a view of a sharded parameter that is gathered. stride, offset: in elements."""
    gathered: Tensor = parameter.data
    full = full_shape(parameter)
    if gathered.numel() != full.numel():  # as_strided over a freed weight would read other memory
        raise RuntimeError(f"parameter {tuple(full)} was not gathered for backward")
    return gathered.as_strided(shape, stride, offset)
