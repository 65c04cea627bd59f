"""The DDP backend: every rank has the full base, and the adapter's gradients are all-reduced during backward."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lorakit.base.lazy import LazyBase
from lorakit.launch.environment import World
from lorakit.lora.inject import adapter_tensors
from lorakit.objectives.cross_entropy import LossModel
from lorakit.parallel.engine import BuildOptimizer
from lorakit.parallel.group import Group
from lorakit.parallel.mesh import make_mesh
from lorakit.parallel.process_group import init_process_group, message_timeout
from lorakit.parallel.resident import fill_resident
from lorakit.parallel.single import SingleEngine
from lorakit.recipe import ParallelSection


class DdpEngine(SingleEngine):
    """torch's DistributedDataParallel, prepared by accelerate. Clip and update run on every rank alike."""

    def __init__(self, world: World, parallel: ParallelSection, device: torch.device) -> None:
        from accelerate.utils import DistributedDataParallelKwargs

        # a step may give some tensors no gradient, such as an expert's; without this setting DDP raises an error then
        # buffers are the base's own, equal on every rank: DDP would send them before each forward
        settings = DistributedDataParallelKwargs(
            find_unused_parameters=True, bucket_cap_mb=parallel.bucket_mb, broadcast_buffers=False
        )
        self._accelerator, group = init_process_group(world, parallel, device, [settings])
        mesh = make_mesh(group, parallel, message_timeout(parallel))
        super().__init__(device, group, parallel.backend, mesh)
        self.shards_base = mesh.pipeline.size * mesh.tensor.size > 1

    def wrap(self, loss_model: LossModel, build: BuildOptimizer, weights: LazyBase | None) -> nn.Module:
        if weights is not None:  # of which this rank has a part
            # without DDP: accelerate's is over all ranks, and its sums expect backward right after a forward
            fill_resident(loss_model, weights, self.device)
            self._optimizer = build(adapter_tensors(loss_model.model))
            return loss_model
        self._optimizer = build(adapter_tensors(loss_model.model))
        prepared: nn.Module = self._accelerator.prepare(loss_model)
        return prepared

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        if last or not isinstance(self._wrapped, DistributedDataParallel):
            return nullcontext()
        return self._wrapped.no_sync()

    def backward(self, loss: Tensor) -> None:
        # times the ranks, because DDP averages gradients over ranks and the loss is divided by all ranks' labels
        num_averaged = self.mesh.tokens.size if isinstance(self._wrapped, DistributedDataParallel) else 1
        (loss * num_averaged).backward()

    def update(self, rate: float) -> float:
        if not isinstance(self._wrapped, DistributedDataParallel):
            sum_gradients(list(adapter_tensors(self._model).values()), self.mesh.tokens)
        return super().update(rate)

    def describe(self) -> dict[str, Any]:
        # read from the object, because accelerate alone decides whether it wraps the model
        wrapped = isinstance(self._wrapped, DistributedDataParallel)
        if (part := self.axes.describe()) is not None:
            return {"engine": part, "backend": "ddp"}
        return {"engine": type(self._wrapped).__name__, "backend": "ddp" if wrapped else "single"}


def sum_gradients(tensors: Sequence[nn.Parameter], group: Group) -> None:
    """Replace each gradient by its sum over a group's ranks, in one message. None stays where no rank has one."""
    if group.size == 1 or not tensors:  # a stage may have nothing to train
        return
    parts = [(torch.zeros_like(t) if t.grad is None else t.grad).flatten() for t in tensors]
    counts = torch.tensor([float(tensor.grad is not None) for tensor in tensors], device=parts[0].device)
    flat = torch.cat([*parts, counts])
    dist.all_reduce(flat, group=group.device_group)
    *sums, counts = flat.split([*(tensor.numel() for tensor in tensors), len(tensors)])
    for tensor, total, count in zip(tensors, sums, counts.tolist(), strict=True):
        tensor.grad = total.view_as(tensor) if count else None
