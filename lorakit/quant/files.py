"""Bases whose files hold packed weights, as transformers and bitsandbytes write them: found, and read."""

import json
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
from lorakit.quant.bnb import BLOCK, FOUR_BITS, NESTED_BLOCK, QuantScheme, code_tables

STATE: Final = ".quant_state.bitsandbytes__"
INT8_SCALE: Final = "SCB"
METHOD: Final = "bitsandbytes"
CPU: Final = torch.device("cpu")


@dataclass(frozen=True)
class QuantizedEntry:
    """A weight that is packed in its file."""

    name: str
    packing: QuantScheme
    shape: tuple[int, int]
    offset: float
    device: torch.device


def quantization_config(folder: Path) -> dict[str, Any] | None:
    """What config.json says of packed weights; None when they are in floats.

    Raises:
        BaseModelError: they are packed in a way that lorakit cannot read.
    """
    told = read_json(folder / "config.json").get("quantization_config")
    if told is None:
        return None
    method = told.get("quant_method") if isinstance(told, dict) else told
    if not isinstance(told, dict) or method != METHOD:
        raise BaseModelError(
            f"{folder}: quantised with {method!r}; lorakit reads {METHOD} (nf4, fp4, int8)."
            " Use the base it was made from"
        )
    return told


def is_quantized(folder: Path) -> bool:
    """Whether config.json says that the weights are packed; errors as ``quantization_config``."""
    return quantization_config(folder) is not None


def quantized_entries(files: BaseFiles, device: torch.device) -> dict[str, QuantizedEntry]:
    """Stored weight name -> how it is packed, for every weight that is.

    Raises:
        BaseModelError: a tensor of one is missing or of another size than the rest says, so unpacking it would read
        past its end; or it is packed in a way that is not read.
    """
    found = {}
    for name in files.shard_of:
        if STATE in name:
            one = _four_bits(files, name.partition(STATE)[0], name, device)
        elif name.endswith(f".{INT8_SCALE}"):
            weight = f"{name.removesuffix(INT8_SCALE)}weight"
            shape = files.entry(weight).shape if weight in files.shard_of else ()
            one = QuantizedEntry(
                weight, QuantScheme("int8"), (shape[0], math.prod(shape[1:])) if shape else (0, 0), 0.0, device
            )
        else:
            continue
        _check_sizes(files, one)
        found[one.name] = one
    return found


def _four_bits(files: BaseFiles, weight: str, state: str, device: torch.device) -> QuantizedEntry:
    try:
        told = json.loads(bytes(files.shard_of[state].read(state).tolist()))
        name, block, nested = told["quant_type"], told["blocksize"], told.get("nested_blocksize")
        out, wide = (int(size) for size in told["shape"])
        offset = float(told.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise BaseModelError(f"{files.folder}: {state}: damaged: {problem!r}") from None
    if name not in FOUR_BITS or block != BLOCK or nested not in (None, NESTED_BLOCK) or min(out, wide) < 1:
        raise BaseModelError(
            f"{files.folder}: {weight}: packed as {name} in blocks of {block} ({nested} of scales); lorakit reads"
            f" blocks of {BLOCK} ({NESTED_BLOCK})"
        )
    return QuantizedEntry(weight, QuantScheme(name, nested is not None), (out, wide), offset, device)


def _names(one: QuantizedEntry) -> dict[str, str]:
    """Tensor of a packed weight -> its stored name."""
    if one.packing.name == "int8":
        return {"weight": one.name, "row_scale": f"{one.name.removesuffix('weight')}{INT8_SCALE}"}
    found = {"weight": one.name, "block_scale": f"{one.name}.absmax"}
    return found | {"nested_scale": f"{one.name}.nested_absmax"} if one.packing.double_quant else found


def _check_sizes(files: BaseFiles, one: QuantizedEntry) -> None:
    expected = one.packing.shapes(*one.shape)
    for key, name in _names(one).items():
        shape, dtype = expected[key]
        size = math.prod(shape) * dtype.itemsize
        entry = files.entry(name) if name in files.shard_of else None
        held = None if entry is None else math.prod(entry.shape) * entry.dtype.itemsize
        if held != size or (entry is not None and key != "weight" and entry.dtype != dtype):
            told = "missing" if entry is None else f"{entry.shape} {entry.dtype}"
            raise BaseModelError(
                f"{files.folder}: {name}: {told}; {one.shape} packed as {one.packing.name} has {shape} {dtype} there"
            )
    codes = code_tables(one.packing.name, CPU) if one.packing.name in FOUR_BITS else ()
    for key, codes_here in zip(("quant_map", "nested_quant_map"), codes, strict=False):
        name = f"{one.name}.{key}"
        if name in files.shard_of and not torch.equal(files.shard_of[name].read(name).float().view(-1), codes_here):
            raise BaseModelError(
                f"{files.folder}: {name}: other values than bitsandbytes' own; they would be unpacked wrong"
            )


def stored_tensors(files: BaseFiles, one: QuantizedEntry) -> dict[str, Tensor]:
    """The tensors of a packed weight, read now."""
    found = {key: files.shard_of[name].read(name).to(one.device) for key, name in _names(one).items()}
    if one.packing.name != "int8":
        found["weight"] = found["weight"].view(torch.uint8).reshape(-1)
    if one.packing.double_quant:
        found["offset"] = torch.tensor([one.offset], device=one.device)
    return found


def dequantized_entries(files: BaseFiles, stored: Mapping[str, QuantizedEntry]) -> dict[str, TensorEntry]:
    """The stored tensors as they were before they were packed."""
    modules = {name.removesuffix(".weight") for name in stored}
    parts = (f".{INT8_SCALE}", ".weight_format")
    return {
        name: TensorEntry(torch.float32, stored[name].shape, 0, 0) if name in stored else files.entry(name)
        for name in files.shard_of
        if name.partition(".weight.")[0] not in modules
        and not (name.endswith(parts) and name.rpartition(".")[0] in modules)
    }
