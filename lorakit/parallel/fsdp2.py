"""torch's FSDP2 (fully_shard): every tensor's rows in parts, gathered layer by layer.

accelerate's FSDP plugin is ignored on CPUs without a word; torch's own function works on both, so it is called here.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lorakit.base.layers import gather_groups
from lorakit.base.loading import return_freed_memory
from lorakit.launch.environment import World
from lorakit.lora.inject import adapter_tensors, checkpoint_tensors
from lorakit.objectives.cross_entropy import LossModel
from lorakit.parallel.engine import BuildOptimizer, FillParameter
from lorakit.parallel.process_group import init_process_group
from lorakit.parallel.single import SingleEngine
from lorakit.parallel.stepping import buffers_to, to_cpu
from lorakit.recipe import ParallelSection


class Fsdp2Engine(SingleEngine):
    """A model of which each rank holds a part of every tensor, adapter and optimizer state included."""

    shards_base = True

    def __init__(self, world: World, parallel: ParallelSection, device: torch.device) -> None:
        self._accelerator, group = init_process_group(world, parallel, device)
        self._parallel = parallel
        super().__init__(device, group, parallel.backend)

    def wrap(self, loss_model: LossModel, build: BuildOptimizer, read: FillParameter | None) -> nn.Module:
        return_freed_memory(self.device)
        model = loss_model.model
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        offload = self._parallel.offloads.parameters == "cpu"
        policy = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if offload else OffloadPolicy()
        for part in gather_groups(model):
            fully_shard(
                part, mesh=mesh, reshard_after_forward=self._parallel.reshard_after_forward, offload_policy=policy
            )
        fully_shard(loss_model, mesh=mesh, offload_policy=policy)
        self._rests_on = torch.device("cpu") if offload else self.device
        materialize_shards(loss_model, self._rests_on, self.rank, read)
        buffers_to(model, self.device)
        self._optimizer = build(adapter_tensors(model))
        return loss_model

    def shard_numel(self, shape: Sequence[int]) -> int:
        return math.ceil(shape[0] / self.world_size) * math.prod(shape[1:])

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        self._forward.set_requires_gradient_sync(last)  # type: ignore[operator]
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        (loss * self.world_size).backward()  # it averages over ranks

    def clip(self, tensors: list[nn.Parameter], limit: float) -> float:
        parts = [_local(tensor.grad) for tensor in tensors if tensor.grad is not None]
        squares = sum((part.float().square().sum() for part in parts), torch.zeros((), device=self._rests_on))
        norm = math.sqrt(self.group.all_reduce_sum(float(squares))[0])
        for part in parts if norm > limit else ():
            part.mul_(limit / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        return norm

    def gather(self) -> dict[str, Tensor]:
        return {name: _full_tensor(tensor, self.device) for name, tensor in checkpoint_tensors(self._model).items()}

    def optimizer_state(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}": _full_tensor(value, self.device)
            for name, tensor in adapter_tensors(self._model).items()
            for key, value in self._optimizer.state[tensor].items()
        }

    def load_state(self, adapter: Mapping[str, Tensor], state: Mapping[str, Mapping[str, Tensor]]) -> None:
        for name, tensor in checkpoint_tensors(self._model).items():
            assert isinstance(tensor, DTensor)
            _local(tensor.detach()).copy_(rows_of(adapter[name], self.world_size, self.rank))
            if name in state:
                self._optimizer.state[tensor] = {
                    part: self._in_parts(value, tensor) for part, value in state[name].items()
                }

    def _in_parts(self, value: Tensor, like: DTensor) -> Tensor:
        if value.shape != like.shape:
            return value.clone()
        local = rows_of(value, self.world_size, self.rank).to(self._rests_on)
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def held_bytes(self) -> dict[str, int]:
        for module in self.loss_model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return super().held_bytes()

    def describe(self) -> dict[str, Any]:
        parts = sum(isinstance(module, FSDPModule) for module in self.loss_model.modules())
        every = all(isinstance(p, DTensor) for p in self._model.parameters())
        return {
            "engine": f"FSDPModule ({parts} groups)" if parts else type(self._model).__name__,
            "backend": "fsdp2" if parts and every else "single",
        }


def materialize_shards(loss_model: LossModel, device: torch.device, rank: int, read: FillParameter | None) -> None:
    """Memory for the shards that are on meta, and this rank's rows of the base in them."""
    waiting = [name for name, parameter in loss_model.model.named_parameters() if parameter.is_meta]
    loss_model._apply(  # type: ignore[no-untyped-call]
        lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
    )
    parameters = dict(loss_model.model.named_parameters())
    for name in waiting:
        parameter = parameters[name]
        assert isinstance(parameter, DTensor)
        assert read is not None
        local = parameter.to_local()
        if local.numel():
            per_row = parameter.numel() // parameter.shape[0]
            start = rank * math.ceil(parameter.shape[0] / parameter.device_mesh.size()) * per_row
            read(name, start, local.detach())


def rows_of(whole: Tensor, num_ranks: int, rank: int) -> Tensor:
    """This rank's rows of a tensor, as fully_shard cuts it; the last ranks may have none."""
    parts = torch.chunk(whole, num_ranks)
    return parts[rank] if rank < len(parts) else whole[:0]


def _local(value: Tensor) -> Tensor:
    """This rank's rows; what is written into them is written into the whole."""
    assert isinstance(value, DTensor)
    return value.to_local()


def _full_tensor(value: Tensor, device: torch.device) -> Tensor:
    if isinstance(value, DTensor):
        there: DTensor = value.to(device)  # type: ignore[assignment]
        return to_cpu(there.full_tensor())
    return to_cpu(value)
