"""Allocate and read the part of a model that stays in memory, for engines that build the base on meta."""

from collections.abc import Container

import torch
from torch import nn

from lorakit.base.lazy import LazyBase
from lorakit.objectives.cross_entropy import LossModel


def materialize_resident(
    loss_model: LossModel, weights: LazyBase, device: torch.device, streamed: Container[int] = ()
) -> None:
    """Allocate and read every parameter on meta that is not streamed, and move the others to the device.

    A parameter that several modules share (a tied head) stays one parameter. streamed: ids of the streamed ones.
    """
    names = {id(tensor): name for name, tensor in loss_model.model.named_parameters()}
    filled: dict[int, nn.Parameter] = {}
    for module in loss_model.modules():
        for key, tensor in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(tensor) in streamed:
                continue
            if not tensor.is_meta:
                tensor.data = tensor.data.to(device)
                continue
            if id(tensor) not in filled:
                filled[id(tensor)] = nn.Parameter(torch.empty_like(tensor, device=device), tensor.requires_grad)
                weights.fill(names[id(tensor)], 0, filled[id(tensor)].detach())
            module.register_parameter(key, filled[id(tensor)])
    move_buffers(loss_model.model, device)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move a model's buffers, such as the frequencies of rotary positions, to the device that computes."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, buffer.to(device))
