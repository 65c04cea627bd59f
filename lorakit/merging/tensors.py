"""The tensors of a merged model: the weights that patches are merged onto, read block by block, and the patches' parts.

For a patch that was trained on a quantised base the weights are the dequantised ones of its training, or the original
ones. Only quantised layers differ between the two: embeddings, heads and norms are the stored ones in both.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import torch

from lorakit.base.lazy import source_of, stored_parts
from lorakit.base.meta import load_on_meta
from lorakit.errors import MergeError
from lorakit.files.base_files import BaseFiles
from lorakit.files.safetensors import MODEL_DTYPES
from lorakit.lora.layer_kinds import LINEAR, LayerKind, expert_kind
from lorakit.lora.merge_weight import RowsUpdate, WeightChange
from lorakit.lora.methods import FACTORS
from lorakit.ops.stored_names import tensor_name
from lorakit.patch import Patch
from lorakit.patch.find import WeightedPatch
from lorakit.patch.fingerprint import ReadElements
from lorakit.quant.files import dequantized_entries, quantized_entries, stored_tensors
from lorakit.quant.published import SCHEMES, quant_scheme
from lorakit.quant.schemes import QuantScheme

ORIGINAL = "original"
DEQUANTIZED = "dequantized"
REASONS: Final = {
    ORIGINAL: "the stored weights; training used quantised ones",
    DEQUANTIZED: "the weights used in training, dequantised; nothing but their rounding is lost",
}


@dataclass(frozen=True)
class TrainedQuantization:
    """The base's quantisation during training."""

    scheme: QuantScheme
    dtype: torch.dtype  # dtype that the quantised layers computed in
    layers: tuple[str, ...]  # names of the quantised layers


def trained_quantization(files: BaseFiles, patches: Sequence[Patch], onto: str | None) -> TrainedQuantization | None:
    """Return the base's quantisation in training, if its dequantised weights are merged onto; None: the stored ones.

    Raises MergeError: ``onto`` names weights that do not exist, or the patches were trained on different quantisations.
    """
    if onto not in (None, ORIGINAL, DEQUANTIZED):
        raise MergeError(f"onto: one of {ORIGINAL}, {DEQUANTIZED}, got {onto!r}")
    stored = quantized_entries(files)
    if onto == ORIGINAL:
        if stored:
            remedy = "name the base they were made from (with --allow base, because the patch's digests are others)"
            raise MergeError(f"onto: {ORIGINAL}: {files.folder} holds quantised weights only; {remedy}")
        return None
    records = [(patch.metadata.get("base") or {}).get("quantized") for patch in patches]
    first = records[0] if records else None
    if others := [record for record in records if record != first]:
        both = f"a base in {_describe(first)}, another patch on one in {_describe(others[0])}"
        raise MergeError(f"{patches[0].folder} was trained on {both}; merge with --onto original, or one at a time")
    if first is not None and first["name"] in SCHEMES:
        scheme = quant_scheme(first["name"], double_quant=bool(first["double"]))
    elif stored:
        scheme = next(iter(stored.values())).scheme
    elif first is not None:
        raise MergeError(f"{patches[0].folder}: trained on a base in {_describe(first)}; name it, or --onto original")
    elif onto == DEQUANTIZED:
        raise MergeError(f"onto: {DEQUANTIZED}: no patch was trained on a quantised base, and {files.folder} is none")
    else:
        return None
    if first is not None:
        return TrainedQuantization(scheme, MODEL_DTYPES[first["dtype"]], tuple(first["layers"]))
    layers = (name.removesuffix(".weight") for name in stored if name.endswith(".weight"))
    dtype = MODEL_DTYPES.get(str(files.config().get("dtype") or files.config().get("torch_dtype")), torch.bfloat16)
    return TrainedQuantization(scheme, dtype, tuple(layers))


def _describe(record: Any) -> str:
    return "floats" if record is None else f"{record['name']} in {record['dtype']}"


@final
class WeightReader:
    """Reads the values that updates are added to: as stored, or of quantised layers as they were in training."""

    def __init__(self, files: BaseFiles, quantization: TrainedQuantization | None = None) -> None:
        self.files = files
        self._quantization = quantization
        self._quantized = {} if quantization is None else quantized_entries(files)
        modules = () if quantization is None else quantization.layers
        others = (module for module in modules if f"{module}.weight" not in self._quantized)
        self._dequantized_names = {*self._quantized, *(tensor_name(files, module) for module in others)}
        self.entries = dequantized_entries(files, self._quantized)
        """dtype, shape and byte range of every tensor, by stored name"""
        if quantization is not None:
            self.entries |= {name: replace(self.entries[name], dtype=quantization.dtype) for name in self._quantized}

    def is_stored(self, name: str) -> bool:
        """True if the tensor's values are the bytes in its file."""
        return name not in self._dequantized_names

    def reader(self, name: str) -> ReadElements:
        """Return the function that reads one tensor: a stored one by ranges, a quantised one as a full tensor."""
        if self.is_stored(name):
            return partial(self.files.shard_of[name].read_elements, name)
        assert self._quantization is not None
        dtype = self._quantization.dtype
        if name in self._quantized:
            entry = self._quantized[name]
            W = entry.scheme.dequantize(stored_tensors(self.files, entry), entry.shape, dtype)
        else:
            scheme = self._quantization.scheme
            W = self.files.shard_of[name].read(name)
            W = scheme.dequantize(scheme.quantize(W.to(dtype)), (W.shape[0], W.shape[1]), dtype)
        flat = W.view(-1)
        return lambda start, stop: flat[start:stop]


@dataclass(frozen=True)
class ExpertSlice:
    """The part of a 3-D parameter that one stored tensor holds: all of it, or rows of one expert's matrix."""

    stored: str
    kind: LayerKind  # of one expert's matrix
    expert: int | None = None  # index of the expert; None: all experts
    rows: slice = field(default_factory=lambda: slice(None))  # rows of the expert's matrix


def expert_slices(folder: Path, names: Iterable[str]) -> dict[str, list[ExpertSlice]]:
    """Return the stored tensors of each 3-D parameter, or router's weight. Raises MergeError unless concatenated."""
    model = load_on_meta(folder, torch.float32)
    return {name: _slices(folder, name, model) for name in names}


def _slices(folder: Path, name: str, model: torch.nn.Module) -> list[ExpertSlice]:
    parameter = model.get_parameter(name)
    kind = expert_kind(model.get_submodule(name.rpartition(".")[0]))
    num_rows, width = parameter.shape[-2:]
    slices = []
    source = source_of(parameter)
    assert source is not None  # load_on_meta refuses a parameter without one
    for stored, offset in stored_parts(source):
        if offset is not None and len(stored.shape) == 3 and stored.shape == tuple(parameter.shape):
            slices.append(ExpertSlice(stored.name, kind))
        elif offset is not None and stored.shape[1:] == (width,) and offset % width == 0:
            expert, first = divmod(offset // width, num_rows)
            slices.append(ExpertSlice(stored.name, kind, expert, slice(first, first + stored.shape[0])))
        else:
            raise MergeError(f"{folder}: {name} is put together from {stored.name} so that no merge can undo it")
    return slices


@dataclass(frozen=True)
class Contribution:
    """One patch's part in one tensor: an update, token rows, or a full tensor."""

    source: WeightedPatch
    name: str  # the module of an update or of token rows; the parameter of experts or of a full tensor
    experts: ExpertSlice | None = None

    def updates(self) -> Sequence[WeightChange]:
        """Read the update of each matrix in the tensor from the patch."""
        patch = self.source.patch
        if (rows := patch.token_rows.get(self.name)) is not None:
            return [RowsUpdate(rows.tokens, rows.tensor, self.source.weight)]
        updates = patch.layers[self.name].updates(self.source.weight)
        if self.experts is None or self.experts.expert is None:
            return updates
        own = updates[self.experts.expert]
        axis = self.experts.kind.stored_axis
        parts = {name: FACTORS[name].part(factor, axis, self.experts.rows) for name, factor in own.tensors.items()}
        return [replace(own, tensors=parts)]


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the merged model and its parts; without parts the base's tensor is copied, or converted."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    base: WeightReader
    stored: str  # the base's tensor that the parts are added to
    kind: LayerKind = LINEAR  # of the layer whose weight this is, or of one expert's matrix
    updates: tuple[Contribution, ...] = ()
    full_tensors: tuple[Contribution, ...] = ()

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.base.entries[self.stored].shape

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize
