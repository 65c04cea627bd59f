"""The backend of one process on one device. Every other backend must give the same updates as this one."""

from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from lorakit.base.lazy import LazyBase
from lorakit.lora.inject import adapter_tensors
from lorakit.objectives.cross_entropy import LossModel
from lorakit.parallel.accounting import local_bytes
from lorakit.parallel.adapter_state import (
    AdapterState,
    BuildOptimizer,
    StepSettings,
    state_to_cpu,
    state_to_device,
    to_cpu,
)
from lorakit.parallel.engine import Engine


class SingleEngine(Engine):
    """The full model in this process, and a torch optimizer over the adapter's own tensors.

    DDP and FSDP2 extend this class, because their optimizers are torch's too.
    """

    def wrap(
        self, loss_model: LossModel, build: BuildOptimizer, settings: StepSettings, weights: LazyBase | None
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        return loss_model, build(adapter_tensors(loss_model.model))

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def reduce(self, adapter: AdapterState) -> float:
        return float(get_total_norm(adapter.gradients()))

    def gather(self, adapter: AdapterState) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in adapter.saved.items():
            yield name, to_cpu(tensor)

    def gather_optimizer(self, adapter: AdapterState) -> Iterator[tuple[str, str, Tensor]]:
        for name, tensor in adapter.tensors.items():
            for part, value in adapter.optimizer.state[tensor].items():
                yield name, part, state_to_cpu(value)

    def scatter(self, adapter: AdapterState, name: str, full: Tensor) -> None:
        adapter.saved[name].detach().copy_(full)

    def scatter_optimizer(self, adapter: AdapterState, name: str, part: str, full: Tensor) -> None:
        adapter.optimizer.state[adapter.tensors[name]][part] = state_to_device(full, self.device)

    def resident(self) -> dict[str, int]:
        adapter = list(self.adapter.tensors.values())
        adapter_ids = {id(tensor) for tensor in adapter}
        return {
            "base": local_bytes(p for p in self._model.parameters() if id(p) not in adapter_ids),
            "adapter": local_bytes(adapter),
            "gradients": local_bytes(self.adapter.gradients()),
            "optimizer": local_bytes(v for state in self.adapter.optimizer.state.values() for v in state.values()),
        }

    def describe(self) -> dict[str, Any]:
        return {"engine": type(self._model).__name__, "backend": "single"}


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
