"""Frozen layers that are in memory only while they compute: two slots, one in use while the other is being filled.

Nothing is written back. Layers are passed one after the other, forward and then backward, so the next one is known.
What autograd keeps of a layer's weights is kept as their place in a slot, and found there again in backward.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lorakit.base.layers import repeated_layers
from lorakit.parallel.engine import FillParameter

ALIGNED: Final = 64
Wait = Callable[[], object]


@dataclass(frozen=True)
class StreamedTensor:
    """A tensor of a layer: whose it is, and where it begins in a slot, in bytes."""

    name: str
    module: nn.Module
    key: str
    absent: nn.Parameter
    start: int

    def within(self, slot: Tensor) -> Tensor:
        part = slot[self.start : self.start + self.absent.nbytes]
        return part.view(self.absent.dtype).view(self.absent.shape)


@final
class StreamedLayer:
    """The tensors of a layer that were on the meta device: its own while it is in a slot."""

    def __init__(self, names: dict[nn.Module, str], layer: nn.Module) -> None:
        self.module, self.nbytes = layer, 0
        self._places: list[StreamedTensor] = []
        for module in layer.modules():
            for key, absent in module._parameters.items():
                if absent is not None and absent.is_meta:
                    self._places.append(StreamedTensor(f"{names[module]}.{key}", module, key, absent, self.nbytes))
                    self.nbytes += -(-absent.nbytes // ALIGNED) * ALIGNED

    def tensors(self) -> Iterator[nn.Parameter]:
        """Those on meta, of which they have name, shape and dtype."""
        return (place.absent for place in self._places)

    def fill(self, read: FillParameter, slot: Tensor) -> None:
        """The values of all of them into a slot."""
        for place in self._places:
            read(place.name, 0, place.within(slot))

    def bind(self, slot: Tensor) -> None:
        """Have them, from a slot that holds them."""
        for place in self._places:
            place.module._parameters[place.key] = nn.Parameter(place.within(slot), requires_grad=False)

    def unbind(self) -> None:
        """Have them no more: a tensor without elements in their place fits no product, whereas one on meta may."""
        for place in self._places:
            place.module._parameters[place.key] = nn.Parameter(torch.empty(0, 0), requires_grad=False)


def streamed_layers(model: nn.Module) -> list[StreamedLayer]:
    """The repeated layers of a model that have tensors on meta, in the order they are passed."""
    names = {module: name for name, module in model.named_modules()}
    return [one for one in (StreamedLayer(names, layer) for layer in repeated_layers(model)) if one.nbytes]


def ids_of(layers: Sequence[StreamedLayer]) -> set[int]:
    """Of the tensors on meta, by which they are told from the others."""
    return {id(tensor) for layer in layers for tensor in layer.tensors()}


class Source(Protocol):
    """Where the values of layers come from."""

    def begin(self, layer: StreamedLayer, slot: Tensor) -> Wait:
        """Begin to fill a slot; what is returned comes back once it is filled, and raises what went wrong."""


@final
class FileSource:
    """Read from the base's files by a thread of its own, while the layer before computes."""

    def __init__(self, read: FillParameter) -> None:
        self._read, self._reader = read, ThreadPoolExecutor(1, "base")

    def begin(self, layer: StreamedLayer, slot: Tensor) -> Wait:
        return self._reader.submit(layer.fill, self._read, slot).result


@final
class HostSource:
    """Copied from host memory, which holds them all, beside what the GPU computes."""

    def __init__(self, read: FillParameter, layers: Sequence[StreamedLayer]) -> None:
        self._copies = torch.cuda.Stream()
        self._host = {layer: torch.empty(layer.nbytes, dtype=torch.uint8, pin_memory=True) for layer in layers}
        for layer, host in self._host.items():
            layer.fill(read, host)

    def begin(self, layer: StreamedLayer, slot: Tensor) -> Wait:
        self._copies.wait_stream(torch.cuda.current_stream())  # the layer that was in the slot has computed
        with torch.cuda.stream(self._copies):
            slot[: layer.nbytes].copy_(self._host[layer], non_blocking=True)
            filled = self._copies.record_event()
        return lambda: torch.cuda.current_stream().wait_event(filled)


@dataclass(frozen=True)
class SlotReference:
    """What autograd keeps of a tensor in a slot: which layer's it is, and where."""

    layer: int
    dtype: torch.dtype
    offset: int | torch.SymInt
    shape: torch.Size
    stride: tuple[int, ...]


@final
class LayerStream:
    """Layers that come and go by themselves as the model calls them. Neighbours are never in the same slot."""

    def __init__(self, layers: Sequence[StreamedLayer], source: Source, device: torch.device) -> None:
        self._layers, self._source = layers, source
        size = max(layer.nbytes for layer in layers)
        self._slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        self._at = {slot.untyped_storage().data_ptr(): number for number, slot in enumerate(self._slots)}
        self._coming: list[tuple[int, Wait] | None] = [None, None]
        self._here: list[int | None] = [None, None]
        for index, layer in enumerate(layers):
            layer.unbind()
            layer.module.register_forward_pre_hook(partial(self._before, index))
            layer.module.register_forward_hook(partial(self._after, index))

    @property
    def nbytes(self) -> int:
        """Of the slots."""
        return sum(slot.nbytes for slot in self._slots)

    def __len__(self) -> int:
        return len(self._layers)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in a slot."""
        return not tensor.is_meta and tensor.untyped_storage().data_ptr() in self._at

    @contextmanager
    def saved_tensors(self) -> Iterator[None]:
        """Around a forward pass and its backward."""
        with saved_tensors_hooks(self.pack, self.unpack):
            yield

    def pack(self, tensor: Tensor) -> Tensor | SlotReference:
        """What autograd is to keep for a tensor."""
        number = self._at.get(tensor.untyped_storage().data_ptr())
        if number is None:
            return tensor
        layer = self._here[number]
        assert layer is not None
        return SlotReference(layer, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())

    pack.unpacks_repeatedly = True  # type: ignore[attr-defined]

    def unpack(self, kept: Tensor | SlotReference) -> Tensor:
        """The tensor again. Raises RuntimeError when its layer is not there."""
        if isinstance(kept, Tensor):
            return kept
        number = kept.layer % 2
        if self._here[number] != kept.layer:
            raise RuntimeError(f"weights of layer {kept.layer} are asked for while layers {self._here} are there")
        return (
            self._slots[number]
            .new_empty(0, dtype=kept.dtype)
            .set_(self._slots[number].untyped_storage(), kept.offset, kept.shape, kept.stride)
        )

    def _before(self, index: int, layer: nn.Module, inputs: Any) -> None:
        self._load(index)

    def _after(self, index: int, layer: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self._load(index))

    def _load(self, index: int) -> None:
        """Have a layer, and the one that is passed next on its way."""
        number = index % 2
        self._prefetch(index)
        coming = self._coming[number]
        if coming is not None:
            self._coming[number] = None
            coming[1]()
            self._layers[index].bind(self._slots[number])
            self._here[number] = index
        backward = torch._C._current_graph_task_id() != -1
        following = index - 1 if backward else index + 1
        if 0 <= following < len(self._layers):
            self._prefetch(following)

    def _prefetch(self, index: int) -> None:
        """Have a layer on its way into its slot, unless it is there."""
        number = index % 2
        coming, here = self._coming[number], self._here[number]
        if here == index or (coming is not None and coming[0] == index):
            return
        if coming is not None:
            self._coming[number] = None
            coming[1]()
        if here is not None:
            self._layers[here].unbind()
        self._here[number] = None
        self._coming[number] = (index, self._source.begin(self._layers[index], self._slots[number]))
