"""Read a base's tensors block by block: as they are stored, or quantised and dequantised as during training.

The merge plan chooses one reader for all tensors of the base.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Protocol, final

from torch import Tensor

from lorakit.files.base_files import BaseFiles
from lorakit.files.safetensors import RangeReader, TensorEntry
from lorakit.merging.onto import CPU, TrainedQuantization
from lorakit.quant.files import dequantized_entries, quantized_entries, stored_tensors

ReadElements = Callable[[int, int], Tensor]
"""(start, stop) -> these elements of a flattened tensor, valid until the next call"""


class WeightReader(Protocol):
    """Reads the values that updates are added to."""

    files: BaseFiles
    entries: Mapping[str, TensorEntry]
    """dtype, shape and byte range of every tensor, by stored name"""

    def is_stored(self, name: str) -> bool:
        """True if the tensor's values are the bytes in its file."""

    def open(self, name: str) -> AbstractContextManager[ReadElements]:
        """Open one tensor for reading."""


@final
class StoredWeights:
    """Reads tensors as they are stored."""

    def __init__(self, files: BaseFiles) -> None:
        self.files = files
        self.entries: Mapping[str, TensorEntry] = {name: files.entry(name) for name in files.shard_of}

    def is_stored(self, name: str) -> bool:
        return True

    @contextmanager
    def open(self, name: str) -> Iterator[ReadElements]:
        with RangeReader(self.files.shard_of[name]) as reader:
            yield partial(reader.elements, name)


@final
class DequantizedWeights:
    """Reads quantised layers as the values they had in training, one full tensor at a time, and the rest as stored."""

    def __init__(self, files: BaseFiles, quantization: TrainedQuantization) -> None:
        self.files = files
        self._quantization = quantization
        self._plain = StoredWeights(files)
        self._stored = quantized_entries(files, CPU)
        self._names = {*self._stored, *(files.weight_name(module) for module in quantization.layers)}
        self.entries: Mapping[str, TensorEntry] = {
            name: replace(entry, dtype=quantization.dtype) if name in self._stored else entry
            for name, entry in dequantized_entries(files, self._stored).items()
        }

    def is_stored(self, name: str) -> bool:
        return name not in self._names

    @contextmanager
    def open(self, name: str) -> Iterator[ReadElements]:
        if self.is_stored(name):
            with self._plain.open(name) as read:
                yield read
            return
        flat = self._dequantized(name).view(-1)
        yield lambda start, stop: flat[start:stop]

    def _dequantized(self, name: str) -> Tensor:
        scheme = self._quantization.scheme
        dtype = self._quantization.dtype
        if name in self._stored:
            entry = self._stored[name]
            return entry.scheme.dequantize(stored_tensors(self.files, entry), entry.shape, dtype)
        W = self.files.shard_of[name].read(name)
        return scheme.dequantize(scheme.quantize(W.to(dtype)), (W.shape[0], W.shape[1]), dtype)
