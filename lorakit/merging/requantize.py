"""A merged model packed again, in the form that transformers and bitsandbytes read; one tensor at a time."""

import json
import os
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor

from lorakit.files.atomic import json_text
from lorakit.files.base_files import INDEX, read_json
from lorakit.files.safetensors import SafetensorsFile, header_bytes, open_tensors, tensor_bytes
from lorakit.merging.dequantized import TrainedQuantization
from lorakit.patch import open_base_files
from lorakit.quant.bnb import BLOCK, NESTED_BLOCK, QuantScheme, code_tables, quantize
from lorakit.quant.files import INT8_SCALE, METHOD, STATE

STATE_BYTES: Final = 256


def requantize_folder(model: Path, seen: TrainedQuantization, linear: list[str]) -> None:
    """Pack the weights of a model folder that training saw packed. ``linear``: every linear layer of the model."""
    files = open_base_files(model)
    weights = {files.weight_name(module) for module in seen.layers}
    for shard in files.shards:
        if weights & shard.entries.keys():
            _repack_file(shard, weights, seen)
    config = read_json(model / "config.json")
    config["quantization_config"] = _settings(seen, [name for name in linear if name not in seen.layers])
    (model / "config.json").write_text(json_text(config))
    if (model / INDEX).is_file():
        shards = {path.name: open_tensors(path) for path in sorted(model.glob("*.safetensors"))}
        weight_map = {name: file for file, shard in shards.items() for name in shard.entries}
        size = sum(e.end - e.start for shard in shards.values() for e in shard.entries.values())
        (model / INDEX).write_text(json_text({"metadata": {"total_size": size}, "weight_map": weight_map}))


def _repack_file(shard: SafetensorsFile, weights: set[str], seen: TrainedQuantization) -> None:
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, entry in shard.entries.items():
        if name in weights:
            shapes |= _shapes(name, seen.packing, (entry.shape[0], entry.shape[1]))
        else:
            shapes[name] = (entry.dtype, entry.shape)
    part = shard.path.with_suffix(".packing")
    with open(part, "wb") as file:
        file.write(header_bytes(shapes, shard.metadata))
        for name in shard.entries:
            _write(file, shard, name, seen if name in weights else None)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, shard.path)


def _write(file: BinaryIO, shard: SafetensorsFile, name: str, seen: TrainedQuantization | None) -> None:
    tensor = shard.read(name)
    if seen is None:
        file.write(tensor_bytes(tensor))
        return
    for value in _stored(tensor.to(seen.dtype), seen).values():
        file.write(tensor_bytes(value))


def _shapes(name: str, packing: QuantScheme, shape: tuple[int, int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The tensors of a packed weight as they are stored, in the order they are written in."""
    plain = {key: (dtype, size) for key, (size, dtype) in packing.shapes(*shape).items()}
    module = name.removesuffix(".weight")
    if packing.name == "int8":
        return {
            name: plain["weight"], f"{module}.{INT8_SCALE}": plain["row_scale"],
            f"{module}.weight_format": (torch.uint8, ()),
        }  # fmt: skip
    found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        name: (torch.uint8, (*plain["weight"][1], 1)), f"{name}.absmax": plain["block_scale"],
        f"{name}.quant_map": (torch.float32, (16,)),
    }  # fmt: skip
    if packing.double_quant:
        found[f"{name}.nested_absmax"] = plain["nested_scale"]
        found[f"{name}.nested_quant_map"] = (torch.float32, (256,))
    found[f"{name}{STATE}{packing.name}"] = (torch.uint8, (STATE_BYTES,))
    return found


def _stored(W: Tensor, seen: TrainedQuantization) -> dict[str, Tensor]:
    """The values of the same, in the same order."""
    packing, tensors = seen.packing, quantize(W, seen.packing)
    if packing.name == "int8":
        return {**tensors, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    codes = code_tables(packing.name, W.device)
    dtype = str(seen.dtype).removeprefix("torch.")
    told: dict[str, Any] = {"quant_type": packing.name, "blocksize": BLOCK, "dtype": dtype, "shape": list(W.shape)}
    found = {"weight": tensors["weight"], "absmax": tensors["block_scale"], "quant_map": codes[0]}
    if packing.double_quant:
        found |= {"nested_absmax": tensors["nested_scale"], "nested_quant_map": codes[1]}
        told |= {
            "nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": float(tensors["offset"])
        }  # fmt: skip
    text = json.dumps(told).encode()
    return found | {"state": torch.tensor(list(text + b" " * (STATE_BYTES - len(text))), dtype=torch.uint8)}


def _settings(seen: TrainedQuantization, skipped: list[str]) -> dict[str, Any]:
    """What transformers reads of it in config.json."""
    four = seen.packing.name != "int8"
    told: dict[str, Any] = {
        "quant_method": METHOD, "load_in_4bit": four, "load_in_8bit": not four,
        "llm_int8_skip_modules": skipped, "llm_int8_threshold": 6.0,
    }  # fmt: skip
    if four:
        told |= {
            "bnb_4bit_quant_type": seen.packing.name, "bnb_4bit_use_double_quant": seen.packing.double_quant,
            "bnb_4bit_compute_dtype": str(seen.dtype).removeprefix("torch."), "bnb_4bit_quant_storage": "uint8",
        }  # fmt: skip
    return told
