"""Read bases whose files hold quantised weights, as transformers and bitsandbytes write them.

The size of every tensor of a quantised weight is checked first, because dequantising reads past the end of a short one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from lorakit.errors import BaseModelError
from lorakit.files.base_files import BaseFiles, read_json
from lorakit.files.safetensors import TensorEntry
from lorakit.ops.stored_names import MXFP4_CODES
from lorakit.quant.published import METHODS, SCALES, SCHEMES, Mxfp4, PublishedScheme, quant_scheme
from lorakit.quant.schemes import CPU, FourBitBlocks, GgufBlocks, QuantScheme, gguf_schemes

STATE: Final = ".quant_state.bitsandbytes__"
INT8_SCALE: Final = "SCB"
METHOD: Final = "bitsandbytes"
GGUF: Final = "gguf"  # of a folder that base/gguf.py wrote


@dataclass(frozen=True)
class QuantizedEntry:
    """A weight that is quantised in its file."""

    name: str  # stored name of the weight's codes
    scheme: QuantScheme
    shape: tuple[int, ...]  # of the weight before it was quantised: (out, in), or of experts (experts, in, out)
    offset: float | None = None  # mean of the blocks' scales with double quantisation


def quantization_config(folder: Path) -> dict[str, Any] | None:
    """Return the quantisation in config.json, or None. Raises BaseModelError for a method that cannot be read."""
    settings = read_json(folder / "config.json").get("quantization_config")
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    if not isinstance(settings, dict) or method not in (METHOD, GGUF, *METHODS):
        known = f"lorakit reads {METHOD} ({', '.join(SCHEMES)}) and {', '.join(METHODS)}"
        raise BaseModelError(f"{folder}: quantised with {method!r}; {known}. Use the base it was made from")
    return settings


def configured_scheme(folder: Path, config: Mapping[str, Any]) -> QuantScheme:
    """Return the scheme that a quantization_config names. Raises BaseModelError: one that is not read."""
    method = str(config.get("quant_method"))
    if method in METHODS:
        try:
            scheme = METHODS[method](config)
            if isinstance(scheme, PublishedScheme):
                scheme.grid(1, 1)  # with the sizes of its blocks
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as problem:
            scheme = f"damaged: {problem!r}"
        if isinstance(scheme, str):
            raise BaseModelError(f"{folder}: quantised with {method}: {scheme}. Use the base it was made from")
        return scheme
    is_int8 = config.get("load_in_8bit", config.get("_load_in_8bit"))  # config.json has either name
    name = "int8" if is_int8 else config.get("bnb_4bit_quant_type", "fp4")
    return quant_scheme(name, double_quant=bool(config.get("bnb_4bit_use_double_quant")))


def quantized_entries(files: BaseFiles) -> dict[str, QuantizedEntry]:
    """Return stored name -> entry of each quantised weight. Raises BaseModelError for a missing or mis-sized tensor."""
    config = quantization_config(files.folder)
    if config is not None and config.get("quant_method") == GGUF:
        return _gguf_entries(files, gguf_schemes(config))
    if config is not None and config.get("quant_method") != METHOD:
        scheme = configured_scheme(files.folder, config)
        return _mxfp4_entries(files, scheme) if isinstance(scheme, Mxfp4) else _published_entries(files, scheme)
    entries = {}
    for name in files.shard_of:
        if STATE in name:
            weight = name.partition(STATE)[0]
            try:
                read = FourBitBlocks.of_state(bytes(files.shard_of[name].read(name).tolist()))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
                raise BaseModelError(f"{files.folder}: {name}: damaged: {problem!r}") from None
            if isinstance(read, str):
                raise BaseModelError(f"{files.folder}: {weight}: {read}")
            entry = QuantizedEntry(weight, *read)
        elif name.endswith(f".{INT8_SCALE}"):
            weight = f"{name.removesuffix(INT8_SCALE)}weight"
            shape = files.entry(weight).shape if weight in files.shard_of else ()
            sizes = (shape[0], math.prod(shape[1:])) if shape else (0, 0)
            entry = QuantizedEntry(weight, quant_scheme("int8"), sizes)
        else:
            continue
        _check_sizes(files, entry)
        entries[entry.name] = entry
    return entries


def _published_entries(files: BaseFiles, scheme: QuantScheme) -> dict[str, QuantizedEntry]:
    assert isinstance(scheme, PublishedScheme)
    entries = {}
    for mark in (name for name in files.shard_of if name.endswith(f".{scheme.mark}")):
        weight = f"{mark.removesuffix(scheme.mark)}weight"
        stored = files.entry(weight).shape if weight in files.shard_of else ()
        if (name := f"{weight.removesuffix('weight')}shape") in files.shard_of:
            stored = tuple(files.shard_of[name].read(name).tolist())
        names = scheme.stored_names(weight)
        if missing := [name for name in names.values() if name not in files.shard_of]:
            raise BaseModelError(f"{files.folder}: {missing[0]}: missing, beside {mark}")
        entries[weight] = QuantizedEntry(weight, scheme, scheme.features(files.entry(mark).shape, stored))
        _check_sizes(files, entries[weight])
    return entries


def _gguf_entries(files: BaseFiles, schemes: Mapping[str, GgufBlocks]) -> dict[str, QuantizedEntry]:
    entries = {}
    for module, scheme in schemes.items():
        name = f"{module}.weight"
        rows, num_bytes = (*files.entry(name).shape, 0)[:2] if name in files.shard_of else (0, 0)
        entries[name] = QuantizedEntry(name, scheme, (rows, scheme.num_columns(num_bytes)))
        _check_sizes(files, entries[name])
    return entries


def _mxfp4_entries(files: BaseFiles, scheme: Mxfp4) -> dict[str, QuantizedEntry]:
    entries = {}
    for codes in (name for name in files.shard_of if name.endswith(MXFP4_CODES)):
        weight = codes.removesuffix(MXFP4_CODES)
        parts = [files.entry(name) for name in scheme.stored_names(weight).values() if name in files.shard_of]
        shape = parts[0].shape
        expected = [(shape, torch.uint8), (shape[:3], torch.uint8)]
        if [(one.shape, one.dtype) for one in parts] != expected or shape[3:] != (scheme.block // 2,):
            stored = " and ".join(f"{one.shape} {one.dtype}" for one in parts)
            wanted = "bytes of (experts, out, blocks, 16) and (experts, out, blocks)"
            raise BaseModelError(f"{files.folder}: {codes} and its scales: {stored}; {wanted} are read")
        entries[weight] = QuantizedEntry(weight, scheme, (shape[0], shape[2] * scheme.block, shape[1]))
    return entries


def _check_sizes(files: BaseFiles, quantized: QuantizedEntry) -> None:
    scheme = quantized.scheme
    expected = scheme.stored_shapes(*quantized.shape)
    for key, name in scheme.stored_names(quantized.name).items():
        shape, dtype = expected[key]
        entry = files.entry(name) if name in files.shard_of else None
        if entry is None or not _holds(entry, math.prod(shape), dtype, key):
            actual = "missing" if entry is None else f"{entry.shape} {entry.dtype}"
            wanted = f"{quantized.shape} quantised as {scheme.name} has {shape} {dtype} there"
            raise BaseModelError(f"{files.folder}: {name}: {actual}; {wanted}")
    for key, own_codes in zip(("quant_map", "nested_quant_map"), scheme.code_tables(CPU), strict=False):
        name = f"{quantized.name}.{key}"
        if name in files.shard_of and not torch.equal(files.shard_of[name].read(name).float().view(-1), own_codes):
            raise BaseModelError(f"{files.folder}: {name}: other values than bitsandbytes' own, so wrong weights")


def _holds(entry: TensorEntry, size: int, dtype: torch.dtype, key: str) -> bool:
    """True if a stored tensor has so many values of a dtype; codes of 4 bits may be in any dtype of as many bytes."""
    num_values = math.prod(entry.shape)
    if key in SCALES and dtype.is_floating_point:
        return num_values == size and entry.dtype.is_floating_point
    same_kind = entry.dtype == dtype or (key == "weight" and dtype == torch.uint8)
    return num_values * entry.dtype.itemsize == size * dtype.itemsize and same_kind


def stored_tensors(files: BaseFiles, entry: QuantizedEntry, device: torch.device = CPU) -> dict[str, Tensor]:
    """Read the tensors of a quantised weight to a device, named as ``QuantScheme.shapes`` names them."""
    names = entry.scheme.stored_names(entry.name)
    tensors = {key: files.shard_of[name].read(name).to(device) for key, name in names.items()}
    if entry.offset is not None:
        tensors["offset"] = torch.tensor([entry.offset], device=device)
    return entry.scheme.stored_tensors(tensors)


def dequantized_entries(files: BaseFiles, quantized: Mapping[str, QuantizedEntry]) -> dict[str, TensorEntry]:
    """Return the stored tensors as they were before quantisation: dtypes and shapes, without scales and codes."""
    modules = {name.removesuffix(".weight") for name in quantized}
    parts = {name for entry in quantized.values() for name in entry.scheme.stored_names(entry.name).values()}
    entries = {
        name: files.entry(name)
        for name in files.shard_of
        # of a quantised layer its bias alone is stored; `q_proj.weight.absmax` and `q_proj.weight_scale` are of q_proj
        if name.endswith(".bias")
        or not (name in parts or name.partition(".weight.")[0] in modules or name.rpartition(".")[0] in modules)
    }
    return entries | {name: TensorEntry(torch.float32, entry.shape, 0, 0) for name, entry in quantized.items()}
