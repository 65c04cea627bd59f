"""The streaming backend: one process, with two layers of the base in memory at a time.

Embedding, last norm, head, adapter and optimizer stay in memory. Layers come from the base's files on a CPU, and from
host memory on a GPU (layer_stream.py).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lorakit.base.lazy import LazyBase
from lorakit.errors import RunError
from lorakit.lora.inject import adapter_tensors
from lorakit.objectives.cross_entropy import LossModel
from lorakit.parallel.accounting import local_bytes
from lorakit.parallel.adapter_state import BuildOptimizer, StepSettings
from lorakit.parallel.group import Group
from lorakit.parallel.layer_stream import FileSource, HostSource, LayerStream, streamed_ids, streamed_layers
from lorakit.parallel.materialize import materialize_resident
from lorakit.parallel.single import SingleEngine
from lorakit.recipe import ParallelSection


class StreamingEngine(SingleEngine):
    """A model whose repeated layers have weights only while they compute."""

    def __init__(self, parallel: ParallelSection, device: torch.device, group: Group) -> None:
        super().__init__(parallel, device, group)
        self.shards_base = True

    def wrap(
        self, loss_model: LossModel, build: BuildOptimizer, settings: StepSettings, weights: LazyBase | None
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        assert weights is not None
        self._stream = stream_layers(loss_model, weights, self.device, in_host_memory=self.device.type == "cuda")
        return loss_model, build(adapter_tensors(loss_model.model))

    def expected_base_bytes(self, base: Sequence[Tensor]) -> int:
        layers = streamed_layers(self._model)
        streamed = streamed_ids(layers)
        resident = sum(p.nbytes for p in base if id(p) not in streamed)
        return resident + 2 * max((layer.nbytes for layer in layers), default=0)

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        return self._stream.saved_tensors()

    def resident(self) -> dict[str, int]:
        # the slots count in full: a layer's parameters are views of them, and a slot's other bytes are memory too
        adapter = {id(tensor) for tensor in self.adapter.tensors.values()}
        others = (p for p in self._model.parameters() if id(p) not in adapter and not self._stream.contains(p))
        return super().resident() | {"base": local_bytes(others) + self._stream.nbytes}

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "engine": f"LayerStream ({len(self._stream)} layers, two at a time)"}


def stream_layers(
    loss_model: LossModel, weights: LazyBase, device: torch.device, *, in_host_memory: bool = False
) -> LayerStream:
    """Fill a model on meta but for its layers, which are read when they compute, from files or from host memory.

    Raises:
        RunError: the model has no layers to read.
    """
    layers = streamed_layers(loss_model.model)
    if not layers:
        raise RunError("parallel.offload: stream reads a base's layers from its files, and found none to read")
    ids = streamed_ids(layers)
    source = HostSource(weights, layers) if in_host_memory else FileSource(weights)
    stream = LayerStream(layers, source, device)
    materialize_resident(loss_model, weights, device, ids)
    return stream
