"""ZeRO-3: every frozen tensor lies in parts, one on each rank, read from the base's files as parts."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lorakit.objectives.cross_entropy import LossModel
from lorakit.parallel.engine import FillParameter
from lorakit.parallel.group import Group


def partition(loss_model: LossModel, config: dict[str, Any], group: Group, read: FillParameter | None) -> None:
    """Give every parameter DeepSpeed's partitioned form; ``read`` fills this rank's part of those on meta.

    A whole frozen tensor never exists: memory is asked for, but only this rank's range of it is ever touched.
    """
    import deepspeed

    init = deepspeed.zero.Init(config_dict_or_path=config, dtype=_frozen_dtype(loss_model), enabled=True)
    for name, parameter in list(loss_model.model.named_parameters()):
        if parameter.is_meta:
            assert read is not None
            parameter = _replace(loss_model, parameter, _touched_in_part(name, parameter, group, read))
        if parameter.requires_grad:
            parameter.data = parameter.data.to(init.local_device)
        init._convert_to_deepspeed_param(parameter)
        parameter.ds_persist = parameter.requires_grad  # type: ignore[attr-defined]
        parameter.partition()  # type: ignore[attr-defined]
        if parameter.device != init.local_device:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=init.local_device)


def keep_adapter_gathered(optimizer: Any, adapter: Iterable[nn.Parameter]) -> None:
    """The adapter's tensors stay whole on every rank, gathered once after an update; frozen tensors never are."""
    tensors = list(adapter)
    for tensor in tensors:
        tensor.ds_persist = True  # type: ignore[attr-defined]
    optimizer.persistent_parameters = tensors
    tensors[0].all_gather(tensors)  # type: ignore[attr-defined]


def set_full_value(tensor: nn.Parameter, value: Tensor, group: Group) -> None:
    """A new value for an adapter's tensor, where it is whole on every rank, and for this rank's part beside it."""
    if tensor.data.shape == value.shape:
        tensor.data.copy_(value)
    part = getattr(tensor, "ds_tensor", None)
    if part is not None:
        start, stop = shard_range(value.numel(), group)
        part.data[: stop - start].copy_(value.reshape(-1)[start:stop])


def full_tensor(tensor: nn.Parameter) -> Tensor:
    """A tensor that does not learn, gathered for a moment if it lies in parts. Collective."""
    if not hasattr(tensor, "ds_tensor"):
        return tensor.detach()
    import deepspeed

    with deepspeed.zero.GatheredParameters([tensor]):
        return tensor.detach().clone()


def shard_range(num_elements: int, group: Group) -> tuple[int, int]:
    """The range of a flattened tensor that lies on this rank."""
    size = math.ceil(num_elements / group.size)
    start = min(group.rank * size, num_elements)
    return start, min(start + size, num_elements)


def _touched_in_part(name: str, parameter: nn.Parameter, group: Group, read: FillParameter) -> nn.Parameter:
    full_tensor = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
    start, stop = shard_range(parameter.numel(), group)
    if start < stop:
        read(name, start, full_tensor.view(-1)[start:stop])
    return nn.Parameter(full_tensor, requires_grad=parameter.requires_grad)


def _replace(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> nn.Parameter:
    """``new`` in all places of ``old``; a tied tensor stays one tensor."""
    for module in model.modules():
        for key, value in list(module._parameters.items()):
            if value is old:
                module._parameters[key] = new
    return new


def _frozen_dtype(model: nn.Module) -> torch.dtype:
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():  # DeepSpeed knows no packed ones
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return max(sizes, key=lambda dtype: sizes[dtype])


def local_tensors(tensors: Iterable[nn.Parameter]) -> list[Tensor]:
    """What of these parameters lies in this process: a partition, and what is gathered."""
    return [t for p in tensors for t in (p.data, getattr(p, "ds_tensor", None)) if isinstance(t, Tensor)]
