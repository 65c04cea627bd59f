"""Read bases whose files hold quantised weights, as transformers and bitsandbytes write them.

The size of every tensor of a quantised weight is checked first, because dequantising reads past the end of a short one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from lorakit.errors import BaseModelError
from lorakit.files.base_files import BaseFiles, read_json
from lorakit.files.safetensors import TensorEntry, dtype_name
from lorakit.ops.stored_names import MXFP4_CODES
from lorakit.quant.published import HALF_BYTES, METHODS, SCALES, SCHEMES, Mxfp4, PublishedScheme, quant_scheme
from lorakit.quant.schemes import CPU, FourBitBlocks, GgufBlocks, QuantScheme, gguf_schemes

STATE: Final = ".quant_state.bitsandbytes__"
INT8_SCALE: Final = "SCB"
METHOD: Final = "bitsandbytes"
GGUF: Final = "gguf"  # of a folder that base/gguf.py wrote
USE_ORIGINAL: Final = "Use the base it was made from"
STATE_BYTES: Final = 1 << 20  # the most that a state of bitsandbytes' is read of
CODES: Final = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)
"""dtypes in which no weight is stored as it is"""
BESIDE: Final[Mapping[str, int | None]] = dict.fromkeys((
    "bias", "input_scale", "input_global_scale", "input_zero_point", "activation_scale", "act_scale", "output_scale",
    "output_zero_point", "weight_shape", "g_idx", "k_scale", "v_scale", "q_scale",
    "channel_wise", "group_size", "packing", "view_as_float", "compute_dtype", "unpack_view_dtype", "quant_scale",
    "quant_zero", "offload_meta", "encoded_state_dict", "stores_quant_config", "optimize", "round_zero",
)) | {"nbits": 4, "axis": 1, "weight_format": 0, "weight_zero_point": 0}  # fmt: skip
"""ending of a tensor beside a weight's codes that does not change the weight -> the one value it may have; None: any"""


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
        raise BaseModelError(f"{folder}: quantised with {method!r}; {known}. {USE_ORIGINAL}")
    return settings


def configured_scheme(folder: Path, config: Mapping[str, Any]) -> QuantScheme:
    """Return the scheme that a quantization_config names. Raises BaseModelError: one that is not read."""
    method = str(config.get("quant_method"))
    if method in METHODS:
        try:
            scheme = METHODS[method](config)
            sizes = (scheme.rows, scheme.columns) if isinstance(scheme, PublishedScheme) else ()
            if not all(size is None or (type(size) is int and size > 0) for size in sizes):
                scheme = "blocks of {} x {}".format(*sizes)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as problem:
            scheme = f"damaged: {problem!r}"
        if isinstance(scheme, str):
            raise BaseModelError(f"{folder}: quantised with {method}: {scheme}. {USE_ORIGINAL}")
        return scheme
    is_int8 = config.get("load_in_8bit", config.get("_load_in_8bit"))  # config.json has either name
    name = "int8" if is_int8 else config.get("bnb_4bit_quant_type", "fp4")
    if name not in ("int8", "fp4", "nf4"):
        raise BaseModelError(f"{folder}: bnb_4bit_quant_type: {name!r}; nf4 and fp4 are read")
    return quant_scheme(name, double_quant=bool(config.get("bnb_4bit_use_double_quant")))


def quantized_entries(files: BaseFiles) -> dict[str, QuantizedEntry]:
    """Return stored name -> entry of each quantised weight.

    Raises BaseModelError: a tensor is missing or of another size, would change a weight and is not read, or has codes
    whose scales are not read, which would be taken for numbers.
    """
    entries = _quantized_entries(files)
    parts, beside = _names_of(files, entries)
    for name in files.shard_of:
        ending = name.rpartition(".")[2]
        stored = files.entry(name)
        if name in parts:
            continue
        if name in beside:
            value = BESIDE.get(ending)
            if ending not in BESIDE or (value is not None and files.shard_of[name].read(name).ne(value).any()):
                unread = f"{name}: beside codes, and lorakit does not read it"
                raise BaseModelError(f"{files.folder}: {unread}. {USE_ORIGINAL}")
        elif len(stored.shape) > 1 and stored.dtype in CODES and stored.shape[:2] != (1, 1):  # a mask of old GPTs
            codes = f"{name} holds codes ({dtype_name(stored.dtype)}), and no scale that lorakit reads is beside it"
            raise BaseModelError(f"{files.folder}: {codes}. {USE_ORIGINAL}")
        elif entries and ending == "scales":  # of activations, as AWQ has them
            unread = f"{name}: scales of no weight, which lorakit does not read"
            raise BaseModelError(f"{files.folder}: {unread}. {USE_ORIGINAL}")
    return entries


def _names_of(files: BaseFiles, entries: Mapping[str, QuantizedEntry]) -> tuple[set[str], set[str]]:
    """Return the stored names of what quantised weights are made of, and of what else their layers have."""
    parts = {name for entry in entries.values() for name in entry.scheme.stored_names(entry.name).values()}
    modules = {name.removesuffix(".weight") for name in entries}
    # `q_proj.weight.absmax` is of the weight of q_proj
    parts |= {name for name in files.shard_of if name.partition(".weight.")[0] in modules}
    return parts, {name for name in files.shard_of if name.rpartition(".")[0] in modules} - parts


def _quantized_entries(files: BaseFiles) -> dict[str, QuantizedEntry]:
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
                if math.prod(files.entry(name).shape) > STATE_BYTES:
                    raise ValueError(f"larger than {STATE_BYTES} bytes")
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
        names = scheme.stored_names(weight)
        if missing := [name for name in names.values() if name not in files.shard_of]:
            raise BaseModelError(f"{files.folder}: {missing[0]}: missing, beside {mark}")
        stored = files.entry(weight).shape if weight in files.shard_of else ()
        if "shape" in names and files.entry(names["shape"]).shape == (2,):
            stored = tuple(files.shard_of[names["shape"]].read(names["shape"]).int().tolist())
        try:
            shape = scheme.features(files.entry(mark).shape, stored)
            if scheme.codes in HALF_BYTES and shape[1] % 2:
                raise ValueError
            entries[weight] = QuantizedEntry(weight, scheme, shape)
            _check_sizes(files, entries[weight])
        except (IndexError, TypeError, ValueError, ArithmeticError):
            sizes = ", ".join(f"{name} {files.entry(name).shape}" for name in names.values())
            raise BaseModelError(f"{files.folder}: {sizes}: not the shapes of {scheme.name}") from None
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
        if entry is None or not _holds(entry, shape, dtype, key, exact=isinstance(scheme, PublishedScheme)):
            actual = "missing" if entry is None else f"{entry.shape} {entry.dtype}"
            wanted = f"{quantized.shape} quantised as {scheme.name} has {shape} {dtype} there"
            raise BaseModelError(f"{files.folder}: {name}: {actual}; {wanted}")
    for key, own_codes in zip(("quant_map", "nested_quant_map"), scheme.code_tables(CPU), strict=False):
        name = f"{quantized.name}.{key}"
        if name in files.shard_of and not torch.equal(files.shard_of[name].read(name).float().view(-1), own_codes):
            raise BaseModelError(f"{files.folder}: {name}: other values than bitsandbytes' own, so wrong weights")


def _holds(entry: TensorEntry, shape: Sequence[int], dtype: torch.dtype, key: str, *, exact: bool) -> bool:
    """True if a stored tensor has as many values of a dtype; codes of 4 bits may be in any dtype of as many bytes.

    exact: in this shape too; a scale may lack dimensions of 1.
    """
    size, num_values = math.prod(shape), math.prod(entry.shape)
    is_scale = key != "weight" and dtype.is_floating_point
    sizes, expected = ([number for number in one if number != 1 or not is_scale] for one in (entry.shape, shape))
    if exact and (sizes != expected or len(entry.shape) > len(shape)):
        return False
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
    try:
        return entry.scheme.stored_tensors(tensors)
    except BaseModelError as problem:
        raise BaseModelError(f"{files.folder}: {entry.name}: {problem}") from None


def dequantized_entries(files: BaseFiles, quantized: Mapping[str, QuantizedEntry]) -> dict[str, TensorEntry]:
    """Return the stored tensors as they were before quantisation: dtypes and shapes, without scales and codes."""
    gone = set.union(*_names_of(files, quantized))
    # of a quantised layer its bias alone is stored
    entries = {name: files.entry(name) for name in files.shard_of if name.endswith(".bias") or name not in gone}
    return entries | {name: TensorEntry(torch.float32, entry.shape, 0, 0) for name, entry in quantized.items()}
