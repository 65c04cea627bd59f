"""The DDP backend: every rank has the full base, and the adapter's gradients are all-reduced during backward."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lorakit.base.lazy import LazyBase
from lorakit.launch.environment import World
from lorakit.lora.inject import adapter_tensors
from lorakit.objectives.cross_entropy import LossModel
from lorakit.parallel.engine import BuildOptimizer
from lorakit.parallel.mesh import make_mesh
from lorakit.parallel.process_group import init_process_group, message_timeout
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
        mesh = make_mesh(group, parallel.sequence, message_timeout(parallel))
        super().__init__(device, group, parallel.backend, mesh)

    def wrap(self, loss_model: LossModel, build: BuildOptimizer, weights: LazyBase | None) -> nn.Module:
        self._optimizer = build(adapter_tensors(loss_model.model))
        prepared: nn.Module = self._accelerator.prepare(loss_model)
        return prepared

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        if last or not isinstance(self._wrapped, DistributedDataParallel):
            return nullcontext()
        return self._wrapped.no_sync()

    def backward(self, loss: Tensor) -> None:
        # times the ranks, because DDP averages gradients over ranks and the loss is divided by all ranks' labels
        (loss * self.mesh.tokens.size).backward()

    def describe(self) -> dict[str, Any]:
        # read from the object, because accelerate alone decides whether it wraps the model
        wrapped = isinstance(self._wrapped, DistributedDataParallel)
        return {"engine": type(self._wrapped).__name__, "backend": "ddp" if wrapped else "single"}
