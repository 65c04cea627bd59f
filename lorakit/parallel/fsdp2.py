"""The FSDP2 backend: torch's `fully_shard`. Each rank stores a part of every tensor, the adapter included.

1. The base is built on meta. `fill` shards it layer by layer and reads only this rank's rows from the base's files.
2. Forward and backward gather one layer from all ranks, compute with it, and free it again.
3. Backward reduce-scatters the adapter's gradients. Each rank updates its own shards of the adapter.

torch's function is called directly, because accelerate's FSDP plugin is ignored on CPUs without an error.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lorakit.base.layers import gather_groups
from lorakit.base.lazy import LazyBase
from lorakit.base.loading import return_freed_memory
from lorakit.base.quantized import move_buffers
from lorakit.lora.wrappers import reshard
from lorakit.objectives.cross_entropy import LossModel
from lorakit.parallel._internals import map_tensors
from lorakit.parallel.single import SingleEngine


class Fsdp2Engine(SingleEngine):
    """A model whose parameters are DTensors. The optimizer's state follows the adapter's shards."""

    def fill(self, loss_model: LossModel, weights: LazyBase | None) -> None:
        return_freed_memory(self.device)  # layers are gathered and freed all the time; glibc would keep their memory
        model = loss_model.model
        # rows of ranks with the same part of the model: pipeline, tensor; data, sequence. Collective over all ranks
        ranks = self.mesh.grid.permute(1, 3, 0, 2).reshape(-1, self.mesh.replicas.size)
        mesh = DeviceMesh(self.device.type, ranks, mesh_dim_names=("parts", "replicas"))["replicas"]
        offload = self.parallel.offloads.parameters == "cpu"
        policy = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if offload else OffloadPolicy()
        shard = partial(fully_shard, mesh=mesh, offload_policy=policy, shard_placement_fn=self._placement)
        for module in gather_groups(model):
            shard(module, reshard_after_forward=self.parallel.reshard_after_forward)
        shard(loss_model)  # last, for parameters outside the layers
        self._shard_device = torch.device("cpu") if offload else self.device
        materialize_shards(loss_model, self._shard_device, self.mesh.replicas.rank, weights)
        move_buffers(model, self.device)  # with offload, materialize_shards has moved them to the CPU

    def _placement(self, parameter: nn.Parameter) -> Shard:
        assert self.facts.shard_dim is not None
        return Shard(self.facts.shard_dim(parameter, self.mesh.replicas.size))

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        self._wrapped.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        # times the ranks, because FSDP averages gradients over ranks and the loss is divided by all ranks' labels
        (loss * self.mesh.replicas.size).backward()

    def reduce(self) -> float:
        return self.norm(_local, self.mesh.replicas)  # of the local parts: one message, not one per tensor

    def to_host(self, value: Any) -> Tensor:
        if isinstance(value, DTensor):
            on_device: Any = value.to(self.device)  # offloaded shards too, because nccl sends from GPUs
            value = on_device.full_tensor()
        return super().to_host(value)

    def scatter(self, name: str, full: Tensor) -> None:
        reshard(self._loss_model)
        tensor = self.adapter.saved[name]
        _local(tensor.detach()).copy_(_local(_shard_like(full, tensor)))

    def scatter_optimizer(self, name: str, part: str, full: Tensor) -> None:
        tensor = self.adapter.tensors[name]
        value = _shard_like(full, tensor) if full.shape == tensor.shape else full
        # AdamW's step count too: its fused kernel reads it on the parameter's device
        self.adapter.optimizer.state[tensor][part] = value.to(self._shard_device, copy=True)

    def resident(self) -> dict[str, int]:
        reshard(self._loss_model)  # the outermost group stays gathered after a forward without backward
        return super().resident()

    def describe(self) -> dict[str, Any]:
        num_groups = sum(isinstance(module, FSDPModule) for module in self._loss_model.modules())
        all_sharded = all(isinstance(p, DTensor) for p in self._model.parameters())
        return {
            "engine": f"FSDPModule ({num_groups} groups)" if num_groups else type(self._model).__name__,
            "backend": "fsdp2" if num_groups and all_sharded else "an engine without shards",
        }


def materialize_shards(loss_model: LossModel, device: torch.device, rank: int, weights: LazyBase | None) -> None:
    """Allocate the shards on meta, and read this rank's rows into them, so that no rank has a full tensor."""
    names_on_meta = [name for name, parameter in loss_model.model.named_parameters() if parameter.is_meta]
    map_tensors(
        loss_model, lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
    )
    for name in names_on_meta:
        parameter = loss_model.model.get_parameter(name)
        assert isinstance(parameter, DTensor)
        assert weights is not None
        shard = parameter.to_local()
        if shard.numel():  # the last ranks have no rows of a tensor that has fewer rows than there are ranks
            row_numel = parameter.numel() // parameter.shape[0]
            start = rank * math.ceil(parameter.shape[0] / parameter.device_mesh.size()) * row_numel
            weights.fill(name, start, shard.detach())


def _shard_like(full: Tensor, like: Tensor) -> DTensor:
    """Return a full tensor of the same values on every rank, sharded like `like`. Nothing is sent."""
    assert isinstance(like, DTensor)
    return distribute_tensor(full.contiguous(), like.device_mesh, like.placements, src_data_rank=None)


def _local(value: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, as a view: writing to them changes the DTensor."""
    assert isinstance(value, DTensor)
    return value.to_local()
