"""A base as training saw it: its weights packed and unpacked again, one at a time, behind the interface of its files.

Only what was packed is rounded so; embeddings, heads and norms are the stored ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor

from lorakit.errors import MergeError
from lorakit.files.safetensors import RangeReader, SafetensorsFile, TensorEntry
from lorakit.patch import BaseFiles, Patch
from lorakit.quant.bnb import QuantScheme, dequantize, quantize
from lorakit.quant.files import QuantizedEntry, dequantized_entries, quantized_entries, stored_tensors

CPU: Final = torch.device("cpu")
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ORIGINAL, DEQUANTIZED = "original", "dequantized"
REASONS: Final = {
    ORIGINAL: "the weights as they are stored, which training did not see",
    DEQUANTIZED: "the weights that training saw, unpacked; the only loss is their rounding",
}


@dataclass(frozen=True)
class TrainedQuantization:
    """How training saw a base."""

    packing: QuantScheme
    dtype: torch.dtype
    layers: tuple[str, ...]


@final
@dataclass(frozen=True)
class DequantizedFile(SafetensorsFile):
    """A base's file whose packed weights are read as what they stand for, in ``seen.dtype``."""

    of: BaseFiles | None = None
    seen: TrainedQuantization | None = None
    held: Mapping[str, QuantizedEntry | None] | None = None
    """packed weight -> how its file has it, or None for one that is stored in floats"""

    @property
    def dequantized_names(self) -> frozenset[str]:
        return frozenset(self.held or ())

    def read_elements(self, name: str, start: int, stop: int) -> Tensor:
        if name in self.dequantized_names:
            return self._unpacked(name).view(-1)[start:stop]
        return super().read_elements(name, start, stop)

    def _unpacked(self, name: str) -> Tensor:
        assert self.of is not None
        assert self.seen is not None
        assert self.held is not None
        one, source = self.held[name], self.of.shard_of[name]
        if one is not None:
            return dequantize(stored_tensors(self.of, one), one.packing, one.shape, self.seen.dtype)
        W = source.read(name)
        tensors = quantize(W.to(self.seen.dtype), self.seen.packing)
        return dequantize(tensors, self.seen.packing, (W.shape[0], W.shape[1]), self.seen.dtype)


@contextmanager
def reading(file: SafetensorsFile) -> Iterator["RangeReader | _Reader"]:
    """Reads parts of a file's tensors one after the other."""
    with RangeReader(file) as plain:
        yield _Reader(file, plain) if isinstance(file, DequantizedFile) else plain


def dequantized_names(file: SafetensorsFile) -> frozenset[str]:
    """Tensors that are read as something else than the file's bytes."""
    return file.dequantized_names if isinstance(file, DequantizedFile) else frozenset()


class _Reader:
    """Elements of one tensor after the other; a packed one is unpacked once."""

    def __init__(self, file: DequantizedFile, plain: RangeReader) -> None:
        self._file, self._plain = file, plain
        self._last: tuple[str, Tensor] | None = None

    def elements(self, name: str, start: int, stop: int) -> Tensor:
        if name not in self._file.dequantized_names:
            return self._plain.elements(name, start, stop)
        if self._last is None or self._last[0] != name:
            self._last = (name, self._file.read(name).view(-1))
        return self._last[1][start:stop]


def trained_quantization(files: BaseFiles, patches: Sequence[Patch], onto: str | None) -> TrainedQuantization | None:
    """How the training of these patches saw the base: packed, or None for in floats, or, with ``onto`` original, for
    each in another way.

    Raises:
        MergeError: they saw it in different ways.
    """
    told = [(patch.metadata.get("base") or {}).get("packed") for patch in patches]
    if onto == ORIGINAL and any(one != told[0] for one in told):
        return None
    if any(one != told[0] for one in told):
        other = _name(next(one for one in told if one != told[0]))
        raise MergeError(
            f"{patches[0].folder} was trained on a base in {_name(told[0])}, another patch on one in {other}; merge"
            " with --onto original, or one at a time"
        )
    if told[0] is not None:
        packing = QuantScheme(told[0]["name"], bool(told[0]["double"]))
        return TrainedQuantization(packing, DTYPES[told[0]["dtype"]], tuple(told[0]["layers"]))
    stored = quantized_entries(files, CPU)
    if not stored:
        return None
    dtype = DTYPES.get(str(files.config().get("dtype") or files.config().get("torch_dtype")), torch.bfloat16)
    layers = tuple(name.removesuffix(".weight") for name in stored)
    return TrainedQuantization(next(iter(stored.values())).packing, dtype, layers)


def choose_target(files: BaseFiles, seen: TrainedQuantization | None, onto: str | None) -> str | None:
    """Onto which weights to merge: as asked, or else those that training saw; None for a base that is not packed.

    Raises:
        MergeError: they are not to be had.
    """
    if onto not in (None, ORIGINAL, DEQUANTIZED):
        raise MergeError(f"onto: one of {ORIGINAL}, {DEQUANTIZED}, got {onto!r}")
    packed = bool(quantized_entries(files, CPU))
    if onto == DEQUANTIZED and seen is None:
        raise MergeError(
            f"onto: {DEQUANTIZED}: {files.folder} is not packed, and no patch says that it was trained on a packed base"
        )
    if onto == ORIGINAL and packed:
        raise MergeError(
            f"onto: {ORIGINAL}: {files.folder} holds packed weights only; name the base they were made from"
            " (and say --allow-base-mismatch: the patch knows the packed one)"
        )
    return onto or (None if seen is None else DEQUANTIZED)


def unpacked_files(files: BaseFiles, seen: TrainedQuantization) -> BaseFiles:
    """The files of a base as training saw it: entries as they are written, weights read as they were seen."""
    stored = quantized_entries(files, CPU)
    names = {files.weight_name(module) for module in seen.layers}
    entries = dequantized_entries(files, stored)
    shards = []
    for shard in files.shards:
        own = {name: entries[name] for name in shard.entries if name in entries}
        held = {name: stored.get(name) for name in own if name in names}
        told = {
            name: TensorEntry(seen.dtype, entry.shape, entry.start, entry.end) if name in stored else entry
            for name, entry in own.items()
        }
        shards.append(DequantizedFile(shard.path, told, shard.metadata, b"", None, files, seen, held))
    holder: dict[str, SafetensorsFile] = {name: shard for shard in shards for name in shard.entries}
    return BaseFiles(files.folder, tuple(shards), holder)


def _name(told: Any) -> str:
    return "floats" if told is None else f"{told['name']} in {told['dtype']}"
