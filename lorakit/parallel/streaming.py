"""The streaming backend: one process, with two layers of the base in memory at a time.

Embedding, last norm, head, adapter and optimizer stay in memory. Frozen layers come from the base's files on a CPU, and
from host memory on a GPU, through two slots: one layer computes while the next one is read. Layers run in order,
forward and then backward, so the next layer is always known. The base never changes, so nothing is written back. A
frozen weight that autograd saves for backward is saved as a reference into its slot (`pack`), because a saved
copy would keep every layer in memory until backward.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from lorakit.base.layers import repeated_layers
from lorakit.base.lazy import LazyBase
from lorakit.base.quantized import materialize
from lorakit.errors import RunError
from lorakit.objectives.cross_entropy import LossModel
from lorakit.ops.recompute import save_packed
from lorakit.parallel._internals import is_in_backward
from lorakit.parallel.engine import local_bytes
from lorakit.parallel.single import SingleEngine


class StreamingEngine(SingleEngine):
    """A model whose repeated layers have weights only while they compute."""

    def fill(self, loss_model: LossModel, weights: LazyBase | None) -> None:
        assert weights is not None
        self._stream = stream_layers(loss_model, weights, self.device, in_host_memory=self.device.type == "cuda")

    def expected_base_bytes(self, base: Sequence[Tensor]) -> int:
        layers = streamed_layers(self._model)
        streamed = {id(tensor.meta) for layer in layers for tensor in layer.tensors}
        resident = sum(p.nbytes for p in base if id(p) not in streamed)
        return resident + 2 * max((layer.nbytes for layer in layers), default=0)

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        return save_packed(self._stream.pack)

    def resident(self) -> dict[str, int]:
        # the slots count in full: a layer's parameters are views of them, and a slot's other bytes are memory too
        others = (p for p in self._model.parameters() if not p.requires_grad and not self._stream.contains(p))
        return super().resident() | {"base": local_bytes(others) + self._stream.nbytes}

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "engine": f"LayerStream ({len(self._stream.layers)} layers, two at a time)"}


def stream_layers(
    loss_model: LossModel, weights: LazyBase, device: torch.device, *, in_host_memory: bool = False
) -> "LayerStream":
    """Fill a model on meta but for its layers, read when they compute. Raises RunError: it has no layers to read."""
    layers = streamed_layers(loss_model.model)
    if not layers:
        raise RunError("parallel.offload: stream reads a base's layers from its files, and found none to read")
    begin = host_source(weights, layers) if in_host_memory else file_source(weights)
    stream = LayerStream(layers, begin, device)  # first, because layers whose parameters are away are not read here
    materialize(loss_model.model, weights, device)
    return stream


ALIGNMENT_BYTES: Final = 64
Wait = Callable[[], object]


@dataclass(frozen=True)
class StreamedTensor:
    """One parameter of a layer: its owner, its key there, itself on meta, and its first byte in a slot."""

    name: str
    module: nn.Module
    key: str
    meta: nn.Parameter
    start: int

    def view_in(self, slot: Tensor) -> Tensor:
        """Return this parameter's part of a slot (a byte tensor), with its own shape and dtype."""
        part = slot[self.start : self.start + self.meta.nbytes]
        return part.view(self.meta.dtype).view(self.meta.shape)

    def assign(self, value: Tensor) -> None:
        """Make a tensor the owner's parameter."""
        self.module.register_parameter(self.key, nn.Parameter(value, requires_grad=False))


@final
class StreamedLayer:
    """A layer's parameters that were on meta, and their layout in a slot. nbytes: what they take in a slot."""

    def __init__(self, names: dict[nn.Module, str], layer: nn.Module) -> None:
        self.module = layer
        self.nbytes = 0
        self.tensors: list[StreamedTensor] = []
        for module in layer.modules():
            for key, meta in module.named_parameters(recurse=False, remove_duplicate=False):
                if meta.is_meta:
                    self.tensors.append(StreamedTensor(f"{names[module]}.{key}", module, key, meta, self.nbytes))
                    # rounded up, because a view of another dtype must begin at a multiple of its element size
                    self.nbytes += -(-meta.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def read_into(self, slot: Tensor, weights: LazyBase) -> None:
        """Read the values of all parameters into a slot."""
        for tensor in self.tensors:
            weights.fill(tensor.name, 0, tensor.view_in(slot))

    def bind(self, slot: Tensor) -> None:
        """Make the parameters views of a slot that contains their values."""
        for tensor in self.tensors:
            tensor.assign(tensor.view_in(slot))

    def unbind(self) -> None:
        """Make computing with the parameters fail: with a weight on meta, `addmm_` on a CPU does nothing."""
        for tensor in self.tensors:
            tensor.assign(torch.empty(0, 0))


def streamed_layers(model: nn.Module) -> list[StreamedLayer]:
    """Return the repeated layers of a model that have parameters on meta, in the order in which they compute."""
    names = {module: name for name, module in model.named_modules()}
    layers = (StreamedLayer(names, layer) for layer in repeated_layers(model))
    return [layer for layer in layers if layer.nbytes]


Begin = Callable[[StreamedLayer, Tensor], Wait]
"""starts to fill a slot with a layer; the returned function waits until it is filled, and raises reading errors"""


def file_source(weights: LazyBase) -> Begin:
    """Read a base's files ahead by a thread; with `pread`, because mapped pages count as resident memory."""
    reader = ThreadPoolExecutor(1, "base")
    return lambda layer, slot: reader.submit(layer.read_into, slot, weights).result


def host_source(weights: LazyBase, layers: Sequence[StreamedLayer]) -> Begin:
    """Copy layers from pinned host memory to the GPU, by a second CUDA stream while the first one computes."""
    copies = torch.cuda.Stream()
    hosts = {layer: torch.empty(layer.nbytes, dtype=torch.uint8, pin_memory=True) for layer in layers}
    for layer, host in hosts.items():
        layer.read_into(host, weights)

    def begin(layer: StreamedLayer, slot: Tensor) -> Wait:
        # the kernels of the layer that was in this slot may still be queued: the copy must not overtake them
        copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copies):
            slot[: layer.nbytes].copy_(hosts[layer], non_blocking=True)
            filled = copies.record_event()
        return lambda: torch.cuda.current_stream().wait_event(filled)

    return begin


@final
class LayerStream:
    """Load each layer just before it computes, into slot i % 2, while the other slot computes. nbytes: of both."""

    def __init__(self, layers: Sequence[StreamedLayer], begin: Begin, device: torch.device) -> None:
        self.layers = layers
        self._begin = begin
        size = max(layer.nbytes for layer in layers)
        self.nbytes = 2 * size
        self._slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        self._slot_at = {slot.untyped_storage().data_ptr(): number for number, slot in enumerate(self._slots)}
        self._loading: dict[int, Wait] = {}  # layer that is being read, one per slot at most -> its wait
        self._resident: list[int | None] = [None, None]  # per slot: the layer whose values are complete
        for index, layer in enumerate(layers):
            layer.unbind()
            layer.module.register_forward_pre_hook(partial(self._load, index))
            layer.module.register_forward_hook(partial(self._after_forward, index))

    def contains(self, tensor: Tensor) -> bool:
        """True if the tensor is a view of a slot."""
        return not tensor.is_meta and tensor.untyped_storage().data_ptr() in self._slot_at

    def pack(self, tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        """Return a reference for a view of a slot, and any other tensor as it is, for `save_packed`."""
        number = self._slot_at.get(tensor.untyped_storage().data_ptr())
        if number is None:
            return tensor
        layer = self._resident[number]
        assert layer is not None
        return partial(self._checked, layer, tensor.detach())

    def _checked(self, layer: int, view: Tensor) -> Tensor:
        """Return a view of a layer's slot. Raises RuntimeError: the layer is not in its slot."""
        if self._resident[layer % 2] != layer:
            # without this check, backward would silently use another layer's weights
            raise RuntimeError(f"weights of layer {layer} are needed while layers {self._resident} are in memory")
        return view

    def _after_forward(self, index: int, layer: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:  # the gradient of a layer's output exists just before the layer's backward
            hidden.register_hook(lambda gradient: self._load(index))

    def _load(self, index: int, *call: Any) -> None:
        """Wait for a layer, and start to read the layer that computes next. call: of a forward pre-hook."""
        number = index % 2
        self._prefetch(index)
        if wait := self._loading.pop(index, None):  # before the wait, so that an error does not stop a later attempt
            wait()
            self.layers[index].bind(self._slots[number])
            self._resident[number] = index
        # activation checkpointing runs a layer's forward during backward: there too, the next layer is the one before
        following = index - 1 if is_in_backward() else index + 1
        if 0 <= following < len(self.layers):
            self._prefetch(following)

    def _prefetch(self, index: int) -> None:
        """Start to read a layer into its slot, unless the layer is there or being read."""
        number = index % 2
        resident = self._resident[number]
        if resident == index or index in self._loading:
            return
        for other in [other for other in self._loading if other % 2 == number]:
            self._loading.pop(other)()  # the slot must not be read into twice at a time
        if resident is not None:
            self.layers[resident].unbind()
        self._resident[number] = None
        self._loading[index] = self._begin(self.layers[index], self._slots[number])
