"""A whole base in every process; the adapter's gradients are added up while backward goes on."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lorakit.launch.environment import World
from lorakit.lora.inject import adapter_tensors
from lorakit.objectives.cross_entropy import LossModel
from lorakit.parallel.engine import BuildOptimizer, FillParameter
from lorakit.parallel.process_group import init_process_group
from lorakit.parallel.single import SingleEngine
from lorakit.recipe import ParallelSection


class DdpEngine(SingleEngine):
    """torch's DistributedDataParallel through accelerate."""

    def __init__(self, world: World, parallel: ParallelSection, device: torch.device) -> None:
        from accelerate.utils import DistributedDataParallelKwargs

        # a tensor that no row of a step reaches, such as an expert's, must not stop the step
        settings = DistributedDataParallelKwargs(find_unused_parameters=True, bucket_cap_mb=parallel.bucket_mb)
        self._accelerator, group = init_process_group(world, parallel, device, [settings])
        super().__init__(device, group, parallel.backend)

    def wrap(self, loss_model: LossModel, build: BuildOptimizer, read: FillParameter | None) -> nn.Module:
        self._optimizer = build(adapter_tensors(loss_model.model))
        prepared: nn.Module = self._accelerator.prepare(loss_model)
        return prepared

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        if last or not isinstance(self._forward, DistributedDataParallel):
            return nullcontext()
        return self._forward.no_sync()

    def backward(self, loss: Tensor) -> None:
        (loss * self.world_size).backward()  # it averages over ranks

    def describe(self) -> dict[str, Any]:
        wrapped = isinstance(self._forward, DistributedDataParallel)
        return {"engine": type(self._forward).__name__, "backend": "ddp" if wrapped else "single"}
