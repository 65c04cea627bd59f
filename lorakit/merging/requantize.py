"""Quantise a merged model for ``--requantize``, in the form that transformers and bitsandbytes read.

One tensor is in memory at a time, and each file is replaced when it is complete.
"""

import json
import os
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor

from lorakit.files.atomic import json_text
from lorakit.files.base_files import INDEX, open_base_files, read_json
from lorakit.files.dtypes import dtype_name
from lorakit.files.safetensors import SafetensorsFile, header_bytes, open_tensors, tensor_bytes
from lorakit.merging.onto import TrainedQuantization
from lorakit.quant.bnb import BLOCK, NESTED_BLOCK, QuantScheme, code_tables, quantize
from lorakit.quant.files import INT8_SCALE, METHOD, STATE

STATE_BYTES: Final = 256
"""size of the padded JSON tensor with a weight's settings"""


def requantize_folder(model: Path, quantization: TrainedQuantization, linear: list[str]) -> None:
    """Quantise the weights of a model folder that were quantised in training. ``linear``: all linear layers' names."""
    files = open_base_files(model)
    weights = {files.weight_name(module) for module in quantization.layers}
    for shard in files.shards:
        if weights & shard.entries.keys():
            _requantize_file(shard, weights, quantization)
    config = read_json(model / "config.json")
    skipped = [name for name in linear if name not in quantization.layers]
    config["quantization_config"] = _quantization_config(quantization, skipped)
    (model / "config.json").write_text(json_text(config))
    if (model / INDEX).is_file():
        shards = {path.name: open_tensors(path) for path in sorted(model.glob("*.safetensors"))}
        weight_map = {name: file for file, shard in shards.items() for name in shard.entries}
        size = sum(e.end - e.start for shard in shards.values() for e in shard.entries.values())
        (model / INDEX).write_text(json_text({"metadata": {"total_size": size}, "weight_map": weight_map}))


def _requantize_file(shard: SafetensorsFile, weights: set[str], quantization: TrainedQuantization) -> None:
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, entry in shard.entries.items():
        if name in weights:
            shapes |= _stored_shapes(name, quantization.scheme, (entry.shape[0], entry.shape[1]))
        else:
            shapes[name] = (entry.dtype, entry.shape)
    part = shard.path.with_suffix(".quantizing")
    with open(part, "wb") as file:
        file.write(header_bytes(shapes, shard.metadata))
        for name in shard.entries:
            _write(file, shard, name, quantization if name in weights else None)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, shard.path)


def _write(file: BinaryIO, shard: SafetensorsFile, name: str, quantization: TrainedQuantization | None) -> None:
    tensor = shard.read(name)
    if quantization is None:
        file.write(tensor_bytes(tensor))
        return
    for value in _stored_tensors(tensor.to(quantization.dtype), quantization).values():
        file.write(tensor_bytes(value))


def _stored_shapes(
    name: str, scheme: QuantScheme, shape: tuple[int, int]
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of a quantised weight's stored tensors, in file order."""
    plain = {key: (dtype, size) for key, (size, dtype) in scheme.shapes(*shape).items()}
    module = name.removesuffix(".weight")
    if scheme.name == "int8":
        return {
            name: plain["weight"], f"{module}.{INT8_SCALE}": plain["row_scale"],
            f"{module}.weight_format": (torch.uint8, ()),
        }  # fmt: skip
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        name: (torch.uint8, (*plain["weight"][1], 1)), f"{name}.absmax": plain["block_scale"],
        f"{name}.quant_map": (torch.float32, (16,)),
    }  # fmt: skip
    if scheme.double_quant:
        shapes[f"{name}.nested_absmax"] = plain["nested_scale"]
        shapes[f"{name}.nested_quant_map"] = (torch.float32, (256,))
    shapes[f"{name}{STATE}{scheme.name}"] = (torch.uint8, (STATE_BYTES,))
    return shapes


def _stored_tensors(W: Tensor, quantization: TrainedQuantization) -> dict[str, Tensor]:
    """Quantise a weight; returns its tensors in the order of ``_stored_shapes``."""
    scheme, tensors = quantization.scheme, quantize(W, quantization.scheme)
    if scheme.name == "int8":
        return {**tensors, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    codes = code_tables(scheme.name, W.device)
    dtype = dtype_name(quantization.dtype)
    state: dict[str, Any] = {"quant_type": scheme.name, "blocksize": BLOCK, "dtype": dtype, "shape": list(W.shape)}
    stored = {"weight": tensors["weight"], "absmax": tensors["block_scale"], "quant_map": codes[0]}
    if scheme.double_quant:
        stored |= {"nested_absmax": tensors["nested_scale"], "nested_quant_map": codes[1]}
        state |= {
            "nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": float(tensors["offset"])
        }  # fmt: skip
    text = json.dumps(state).encode()
    return stored | {"state": torch.tensor(list(text + b" " * (STATE_BYTES - len(text))), dtype=torch.uint8)}


def _quantization_config(quantization: TrainedQuantization, skipped: list[str]) -> dict[str, Any]:
    """Return the entry of config.json that transformers reads."""
    four_bit = quantization.scheme.name != "int8"
    config: dict[str, Any] = {
        "quant_method": METHOD, "load_in_4bit": four_bit, "load_in_8bit": not four_bit,
        "llm_int8_skip_modules": skipped, "llm_int8_threshold": 6.0,
    }  # fmt: skip
    if four_bit:
        config |= {
            "bnb_4bit_quant_type": quantization.scheme.name,
            "bnb_4bit_use_double_quant": quantization.scheme.double_quant,
            "bnb_4bit_compute_dtype": dtype_name(quantization.dtype),
            "bnb_4bit_quant_storage": "uint8",
        }  # fmt: skip
    return config
