"""The FSDP2 backend: torch's `fully_shard`. Each rank stores a part of the rows of every tensor, the adapter included.

1. The base is built on meta. `wrap` shards it layer by layer and reads only this rank's rows from the base's files.
2. Forward and backward gather one layer from all ranks, compute with it, and free it again.
3. Backward reduce-scatters the adapter's gradients. Each rank updates its own rows of the adapter.

torch's function is called directly, because accelerate's FSDP plugin is ignored on CPUs without an error.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lorakit.base.layers import gather_groups
from lorakit.base.lazy import LazyBase
from lorakit.base.loading import return_freed_memory
from lorakit.launch.environment import World
from lorakit.lora.inject import adapter_tensors, checkpoint_tensors
from lorakit.objectives.cross_entropy import LossModel
from lorakit.parallel._internals import map_tensors
from lorakit.parallel.engine import BuildOptimizer
from lorakit.parallel.mesh import Mesh, make_mesh
from lorakit.parallel.process_group import init_process_group, message_timeout
from lorakit.parallel.resident import move_buffers
from lorakit.parallel.single import SingleEngine
from lorakit.parallel.stepping import to_cpu
from lorakit.recipe import ParallelSection


class Fsdp2Engine(SingleEngine):
    """A model whose parameters are DTensors, sharded by rows. The optimizer's state follows the adapter's shards."""

    shards_base = True

    def __init__(self, world: World, parallel: ParallelSection, device: torch.device) -> None:
        self._accelerator, group = init_process_group(world, parallel, device)
        self._parallel = parallel
        mesh = make_mesh(group, parallel, message_timeout(parallel))
        super().__init__(device, group, parallel.backend, mesh)

    def wrap(self, loss_model: LossModel, build: BuildOptimizer, weights: LazyBase | None) -> nn.Module:
        return_freed_memory(self.device)  # layers are gathered and freed all the time; glibc would keep their memory
        model = loss_model.model
        mesh = token_mesh(self.mesh, self.device)
        offload = self._parallel.offloads.parameters == "cpu"
        policy = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if offload else OffloadPolicy()
        for module in gather_groups(model):
            fully_shard(
                module, mesh=mesh, reshard_after_forward=self._parallel.reshard_after_forward, offload_policy=policy
            )
        fully_shard(loss_model, mesh=mesh, offload_policy=policy)  # last, for parameters outside the layers
        self._shard_device = torch.device("cpu") if offload else self.device
        materialize_shards(loss_model, self._shard_device, self.mesh.tokens.rank, weights)
        move_buffers(model, self.device)  # with offload, materialize_shards has moved them to the CPU
        self._optimizer = build(adapter_tensors(model))  # after sharding, because parameters are replaced by DTensors
        return loss_model

    def shard_numel(self, shape: Sequence[int]) -> int:
        return math.ceil(shape[0] / self.mesh.tokens.size) * math.prod(shape[1:])

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        self._wrapped.set_requires_gradient_sync(last)  # type: ignore[operator]
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        # times the ranks, because FSDP averages gradients over ranks and the loss is divided by all ranks' labels
        (loss * self.mesh.tokens.size).backward()

    def clip(self, tensors: Mapping[str, nn.Parameter], limit: float) -> float:
        shards = [_local(tensor.grad) for tensor in tensors.values() if tensor.grad is not None]
        squares = self.axes.sum_gradients(_local)
        if squares is None:
            zero = torch.zeros((), device=self._shard_device)
            squares = float(sum((shard.float().square().sum() for shard in shards), zero))
        # one message, not one per tensor
        norm = self.axes.norm_over_layers(math.sqrt(self.mesh.tokens.all_reduce_sum(squares)[0]))
        for shard in shards if norm > limit else ():
            shard.mul_(limit / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        return norm

    def stage_adapter(self) -> dict[str, Tensor]:
        return {
            name: self.join(name, _full_tensor(tensor, self.device))
            for name, tensor in checkpoint_tensors(self._model).items()
        }

    def stage_optimizer_state(self) -> dict[str, Tensor]:
        self._free_gathered()  # the optimizer knows the shards
        return {
            f"{name}.{part}": self.join(name, _full_tensor(value, self.device))
            for name, tensor in adapter_tensors(self._model).items()
            for part, value in self._optimizer.state[tensor].items()
        }

    def load_state(self, adapter: Mapping[str, Tensor], state: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._free_gathered()
        for name, tensor in checkpoint_tensors(self._model).items():
            assert isinstance(tensor, DTensor)
            own = self.part(name, adapter[name])
            _local(tensor.detach()).copy_(shard_rows(own, self.mesh.tokens.size, self.mesh.tokens.rank))
            if name in state:
                self._optimizer.state[tensor] = {
                    part: self._shard_like(self.part(name, value), tensor) for part, value in state[name].items()
                }

    def _shard_like(self, value: Tensor, like: DTensor) -> Tensor:
        """Return a full value of the optimizer's state as a DTensor sharded like `like`; a step count as it is."""
        if value.shape != like.shape:
            # AdamW's step count too: its fused kernel reads it on the parameter's device
            return value.to(self._shard_device, copy=True)
        local = shard_rows(value, self.mesh.tokens.size, self.mesh.tokens.rank).to(self._shard_device)
        # shape and stride are given, because from_local would assume that all ranks have equally many rows
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def resident_bytes(self) -> dict[str, int]:
        self._free_gathered()
        return super().resident_bytes()

    def _free_gathered(self) -> None:
        """Put the shards back in the model: the outermost group stays gathered after a forward without backward."""
        for module in self._loss_model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def describe(self) -> dict[str, Any]:
        num_groups = sum(isinstance(module, FSDPModule) for module in self._loss_model.modules())
        all_sharded = all(isinstance(p, DTensor) for p in self._model.parameters())
        return {
            "engine": f"FSDPModule ({num_groups} groups)" if num_groups else type(self._model).__name__,
            "backend": "fsdp2" if num_groups and all_sharded else "single",
        }


def token_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """Return torch's mesh of the ranks with the same part of the model as this one. Collective over all ranks."""
    ranks = mesh.grid.permute(1, 3, 0, 2).reshape(-1, mesh.tokens.size)  # pipeline, tensor; data, sequence
    return DeviceMesh(device.type, ranks, mesh_dim_names=("parts", "tokens"))["tokens"]


def materialize_shards(loss_model: LossModel, device: torch.device, rank: int, weights: LazyBase | None) -> None:
    """Allocate the shards that are on meta, and read this rank's rows of the base into them.

    No rank ever has a full tensor of the base in memory.
    """
    names_on_meta = [name for name, parameter in loss_model.model.named_parameters() if parameter.is_meta]
    map_tensors(
        loss_model, lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
    )
    parameters = dict(loss_model.model.named_parameters())
    for name in names_on_meta:
        parameter = parameters[name]
        assert isinstance(parameter, DTensor)
        assert weights is not None
        shard = parameter.to_local()
        if shard.numel():  # the last ranks have no rows of a tensor that has fewer rows than there are ranks
            row_numel = parameter.numel() // parameter.shape[0]
            start = rank * math.ceil(parameter.shape[0] / parameter.device_mesh.size()) * row_numel
            weights.fill(name, start, shard.detach())


def shard_rows(full: Tensor, num_ranks: int, rank: int) -> Tensor:
    """Return a rank's rows of a full tensor, split as `fully_shard` splits it. The last ranks may have none."""
    shards = torch.chunk(full, num_ranks)
    return shards[rank] if rank < len(shards) else full[:0]


def _local(value: Tensor) -> Tensor:
    """Return this rank's rows of a DTensor, as a view: writing to them changes the DTensor."""
    assert isinstance(value, DTensor)
    return value.to_local()


def _full_tensor(value: Tensor, device: torch.device) -> Tensor:
    """Return the full tensor in float32 on the CPU. Collective for DTensors."""
    if isinstance(value, DTensor):
        on_device: DTensor = value.to(device)  # type: ignore[assignment] # offloaded shards too: nccl sends from GPUs
        return to_cpu(on_device.full_tensor())
    return to_cpu(value)
