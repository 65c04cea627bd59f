"""GGUF files with llama.cpp's blocks: every weight of a layer of one type, as llama.cpp's own package reads them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from lorakit.base.gguf_tokenizer import SPLITTERS


def rewrite(
    source: Path,
    target: Path,
    *,
    kind: str | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    **settings: Any,
) -> Path:
    """Write a GGUF again, its layers' weights as blocks of `kind`, with other settings (None: without it)."""
    reader = GGUFReader(str(source))
    own = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    own |= {key.replace("__", "."): value for key, value in settings.items()}
    writer = GGUFWriter(target, own.pop("general.architecture"))
    for key, value in own.items():
        if value is not None:
            add: Any = {
                bool: writer.add_bool,
                int: writer.add_uint32,
                float: writer.add_float32,
                str: writer.add_string,
            }
            add.get(type(value), writer.add_array)(key, value)
    for tensor in reader.tensors:
        data, own_kind = tensor.data, tensor.tensor_type
        if kind is not None and tensor.name.startswith("blk.") and len(tensor.shape) == 2:
            own_kind = GGMLQuantizationType[kind]
            data = blocks(dequantize(data, tensor.tensor_type), own_kind)
        writer.add_tensor(tensor.name, data, raw_dtype=own_kind)
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def blocks(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Return blocks of a weight (out, in): its own where the package quantises to this type, else drawn ones."""
    try:
        return quantize(values, kind)
    except NotImplementedError:
        block, size = GGML_QUANT_SIZES[kind]
        rows, columns = values.shape
        random = np.random.default_rng(rows)
        drawn = random.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
        scale = np.float16(0.001 * random.random((rows, columns // block, 1))).view(np.uint8)
        for at in {"Q6_K": [208], "Q3_K": [108], "Q2_K": [80, 82], "Q4_K": [0, 2], "Q5_K": [0, 2]}.get(kind.name, [0]):
            drawn[:, :, at : at + 2] = scale
        if kind.name == "IQ1_M":  # four bits of its scale in each of four words
            drawn[:, :, [49, 51, 53, 55]] = [0x00, 0x00, 0x40, 0x10]
        return drawn.reshape(rows, -1)


def split_as(tokenizer: Any, name: str) -> Any:
    """The built-in tokenizer, whose words are made as one of llama.cpp's names says."""
    pre_tokenizer, ignores_merges, normalizer = SPLITTERS[name].as_json()
    text = json.loads(tokenizer.backend_tokenizer.to_str())
    text |= {"pre_tokenizer": pre_tokenizer, "normalizer": normalizer and {"type": normalizer}}
    text["model"]["ignore_merges"] = ignores_merges
    own = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(text)))
    own.bos_token, own.eos_token, own.pad_token = tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token
    own.chat_template = tokenizer.chat_template
    return own
