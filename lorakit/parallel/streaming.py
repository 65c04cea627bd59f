"""One process that holds two layers of the base at a time: from its files on a CPU, from host memory on a GPU."""

from collections.abc import Container, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lorakit.errors import RunError
from lorakit.lora.inject import adapter_tensors
from lorakit.objectives.cross_entropy import LossModel
from lorakit.parallel.accounting import bytes_held
from lorakit.parallel.engine import BuildOptimizer, FillParameter
from lorakit.parallel.layer_stream import FileSource, HostSource, LayerStream, ids_of, streamed_layers
from lorakit.parallel.single import SingleEngine
from lorakit.parallel.stepping import buffers_to


class StreamingEngine(SingleEngine):
    """What is no repeated layer (embedding, norm, head) stays; so do adapter and optimizer."""

    shards_base = True

    def wrap(self, loss_model: LossModel, build: BuildOptimizer, read: FillParameter | None) -> nn.Module:
        layers = streamed_layers(loss_model.model)
        if read is None or not layers:
            raise RunError("parallel.offload: stream reads a base's layers from its files, and found none to read")
        source = HostSource(read, layers) if self.device.type == "cuda" else FileSource(read)
        self._stream = LayerStream(layers, source, self.device)
        fill_others(loss_model, ids_of(layers), read, self.device)
        self._optimizer = build(adapter_tensors(loss_model.model))
        return loss_model

    def resident_base_bytes(self, base: Sequence[Tensor]) -> int:
        layers = streamed_layers(self._model)
        streamed = ids_of(layers)
        return sum(p.nbytes for p in base if id(p) not in streamed) + 2 * max((one.nbytes for one in layers), default=0)

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        return self._stream.saved_tensors()

    def held_bytes(self) -> dict[str, int]:
        adapter = {id(tensor) for tensor in adapter_tensors(self._model).values()}
        others = (p for p in self._model.parameters() if id(p) not in adapter and not self._stream.holds(p))
        return super().held_bytes() | {"base": bytes_held(others) + self._stream.nbytes}

    def describe(self) -> dict[str, Any]:
        return {"engine": f"LayerStream ({len(self._stream)} layers, two at a time)", "backend": "single"}


def fill_others(loss_model: LossModel, streamed: Container[int], read: FillParameter, device: torch.device) -> None:
    """Memory and values for the tensors that are not streamed, each once wherever it hangs; the rest to the device."""
    names = {id(tensor): name for name, tensor in loss_model.model.named_parameters()}
    made: dict[int, nn.Parameter] = {}
    for module in loss_model.modules():
        for key, tensor in module._parameters.items():
            if tensor is None or id(tensor) in streamed:
                continue
            if not tensor.is_meta:
                tensor.data = tensor.data.to(device)
                continue
            if id(tensor) not in made:
                made[id(tensor)] = nn.Parameter(torch.empty_like(tensor, device=device), tensor.requires_grad)
                read(names[id(tensor)], 0, made[id(tensor)].detach())
            module._parameters[key] = made[id(tensor)]
    buffers_to(loss_model.model, device)
