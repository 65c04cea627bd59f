"""Read a GGUF file as a base: a model folder in the user's cache, made once, in which blocks stay as they are.

Weights of linear layers keep llama.cpp's 2 to 8 bits (quant/gguf.py); what is looked up by rows, the embedding and the
head, becomes floats.
"""

import hashlib
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lorakit.base._internals import read_gguf
from lorakit.base.gguf_form import ROPE_FACTORS, gguf_config, head_rows, renamed, tensor_names
from lorakit.base.gguf_tokenizer import read_tokenizer
from lorakit.base.transformers_io import WHY_NO_TOKENIZER
from lorakit.errors import BaseModelError
from lorakit.files.atomic import atomic_folder, file_signature, write_json
from lorakit.files.base_files import SINGLE
from lorakit.files.cache import cache_folder
from lorakit.files.safetensors import header_bytes, tensor_bytes
from lorakit.quant.gguf import GgufBlocks

END_TOKENS: Final = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
FLOATS: Final = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # by the number of a type in ggml.h


class LazyTensor(NamedTuple):
    """A tensor that is to be written: its dtype, its shape, and what reads it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def open_gguf(file: Path) -> Path:
    """Return the model folder of a GGUF file, made if need be.

    Raises BaseModelError: damaged, or of another kind of model. TemporaryFailure: the disk is full.
    """
    key = hashlib.sha256(f"form 1, {file.resolve()} {file_signature(file)}".encode()).hexdigest()[:16]
    folder = cache_folder("gguf") / f"{file.stem}-{key}"
    if not folder.is_dir():
        print(f"reading {file} into {folder}, once", file=sys.stderr)
        with suppress(FileExistsError), _explained(file):  # another process has made it
            _write_folder(file, folder)
    return folder


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    try:
        yield
    except BaseModelError as problem:
        raise BaseModelError(f"{file}: {problem}. Use the model it was made from") from None
    except (ValueError, LookupError, TypeError, ArithmeticError, RuntimeError, struct.error) as problem:
        raise BaseModelError(f"{file}: not a complete GGUF file: {type(problem).__name__}: {problem}") from None


def _write_folder(file: Path, folder: Path) -> None:
    settings, stored = read_gguf(file)
    if settings.get("split.count", 1) > 1:
        raise BaseModelError("one of several parts; join them first (llama-gguf-split --merge)")
    factors = stored.pop(ROPE_FACTORS)[:].numpy() if ROPE_FACTORS in stored else None
    config = gguf_config(settings, stored.keys(), factors)
    layers = {name.split(".")[1] for name in stored if name.startswith("blk.")}
    if len(layers) != config["num_hidden_layers"]:
        raise BaseModelError(f"it has {len(layers)} layers, and its settings say {config['num_hidden_layers']}")
    names = tensor_names(len(layers))
    tensors: dict[str, LazyTensor] = {}
    types: dict[str, int] = {}
    for name, blocks in stored.items():
        own = renamed(name, names)
        module = own.rpartition(".")[0]
        is_packed = blocks.ggml_type not in FLOATS and name.startswith("blk.") and len(blocks.shape) == 2
        types |= {module: blocks.ggml_type} if is_packed else {}
        tensors[own] = _lazy_tensor(blocks, is_packed, head_rows(module, config))
    config |= {"quantization_config": {"quant_method": "gguf", "types": types}} if types else {}
    ends = [settings[key] for key in END_TOKENS if key in settings]
    with atomic_folder(folder) as staging:
        write_json(staging / "config.json", config)
        write_json(staging / "generation_config.json", {"eos_token_id": ends})
        tokenizer = read_tokenizer(settings)
        if isinstance(tokenizer, str):
            (staging / WHY_NO_TOKENIZER).write_text(tokenizer)
        else:
            tokenizer.save_pretrained(staging)
        with open(staging / SINGLE, "wb") as written:
            written.write(header_bytes({own: (one.dtype, one.shape) for own, one in tensors.items()}, {"format": "pt"}))
            for one in tensors.values():
                written.write(tensor_bytes(one.read()))


def _lazy_tensor(blocks: Any, is_packed: bool, rows: np.ndarray | None) -> LazyTensor:
    """Return a tensor as the folder has it: its blocks (out, bytes), or its values. rows: as ``head_rows``."""
    shape = tuple(blocks.shape)
    dtype = torch.uint8 if is_packed else FLOATS.get(blocks.ggml_type, torch.float32)
    scheme = None if is_packed or blocks.ggml_type in FLOATS else GgufBlocks("gguf", ggml_type=blocks.ggml_type)
    if scheme is not None:
        shape = (*shape[:-1], scheme.num_columns(shape[-1]))

    def read() -> Tensor:
        stored: Tensor = blocks[:]
        values = stored if scheme is None else scheme.dequantize({"weight": stored}, shape, dtype)
        if rows is None:
            return values
        ordered = torch.empty_like(values)
        ordered[torch.from_numpy(rows)] = values
        return ordered

    return LazyTensor(dtype, shape, read)
