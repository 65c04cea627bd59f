"""Read a GGUF file as a base: a model folder in the user's cache, made once, in which blocks stay as they are.

Weights of linear layers keep llama.cpp's 2 to 8 bits (quant/schemes.py); the embedding and the head become floats.
"""

import hashlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lorakit.base._internals import read_gguf
from lorakit.base.gguf_form import ROPE_FACTORS, gguf_config, head_rows, renamed, tensor_names
from lorakit.base.gguf_tokenizer import read_tokenizer
from lorakit.base.transformers_io import GENERATION_CONFIG, WHY_NO_TOKENIZER, load_skeleton
from lorakit.errors import BaseModelError, LorakitError
from lorakit.files.atomic import atomic_folder, file_signature, write_json
from lorakit.files.base_files import SINGLE
from lorakit.files.cache import cache_folder
from lorakit.files.safetensors import header_bytes, tensor_bytes
from lorakit.quant.schemes import GgufBlocks

ENDS: Final = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
FLOATS: Final = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # by the number of a type in ggml.h


class LazyTensor(NamedTuple):
    """A tensor that is to be written: its dtype, its shape, and what reads it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def open_gguf(file: Path) -> Path:
    """Return the model folder of a GGUF file, made if need be. Raises BaseModelError: damaged, or of another kind."""
    text = f"form 1, {file.resolve()} {file_signature(file)}"
    key = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
    folder = cache_folder("gguf") / f"{file.stem[:64]}-{key}"
    if not folder.is_dir():
        print(f"reading {file} into {folder}, once", file=sys.stderr)
        try:
            _write_folder(file, folder)
        except BaseModelError as problem:
            raise BaseModelError(f"{file}: {problem}. Use the model it was made from") from None
        except OSError as problem:  # perhaps because another process has made it
            if not folder.is_dir():
                raise BaseModelError(f"{folder}: cannot be written: {problem.strerror}") from None
        except LorakitError:
            raise
        except Exception as problem:  # of many kinds, where the content is not what it should be
            raise BaseModelError(f"{file}: not a complete GGUF file: {type(problem).__name__}: {problem}") from None
    return folder


def _write_folder(file: Path, folder: Path) -> None:
    before = file_signature(file)
    with atomic_folder(folder) as staging:
        settings, stored = read_gguf(file)
        if settings.get("split.count", 1) > 1:
            raise BaseModelError("one of several parts; join them first (llama-gguf-split --merge)")
        factors = stored.pop(ROPE_FACTORS)[:].numpy() if ROPE_FACTORS in stored else None
        config = gguf_config(settings, stored.keys(), factors)
        names = tensor_names(len({name.split(".")[1] for name in stored if name.startswith("blk.")}))
        blocks = {renamed(name, names): one for name, one in stored.items()}
        packed = {own for own, one in blocks.items() if ".layers." in own and one.ggml_type not in FLOATS}
        types = {own.removesuffix(".weight"): blocks[own].ggml_type for own in sorted(packed)}
        config |= {"quantization_config": {"quant_method": "gguf", "types": types}} if types else {}
        write_json(staging / "config.json", config)
        check_same_tensors(staging, {own: _lazy_tensor(one).shape for own, one in blocks.items()})
        write_json(staging / GENERATION_CONFIG, {"eos_token_id": [settings[key] for key in ENDS if key in settings]})
        tokenizer = read_tokenizer(settings)
        if isinstance(tokenizer, str):
            (staging / WHY_NO_TOKENIZER).write_text(tokenizer)
        else:
            tokenizer.save_pretrained(staging)
        rows = {own: head_rows(own.rpartition(".")[0], config) for own in blocks}
        tensors = {own: _lazy_tensor(one, is_packed=own in packed, rows=rows[own]) for own, one in blocks.items()}
        with open(staging / SINGLE, "wb") as written:
            written.write(header_bytes({own: (one.dtype, one.shape) for own, one in tensors.items()}, {"format": "pt"}))
            for one in tensors.values():
                written.write(tensor_bytes(one.read()))
        if file_signature(file) != before:
            raise BaseModelError("changed while it was read; try again")


def check_same_tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise BaseModelError unless these are the tensors of the model of a folder's config.json, each of its shape."""
    expected = {name: tuple(tensor.shape) for name, tensor in load_skeleton(folder).named_parameters()}
    if others := expected.items() ^ shapes.items():
        name = min(name for name, _ in others)
        raise BaseModelError(f"tensor {name}: {shapes.get(name, 'missing')}, and the model has {expected.get(name)}")


def _lazy_tensor(blocks: Any, *, is_packed: bool = False, rows: np.ndarray | None = None) -> LazyTensor:
    """Return a tensor as the folder has it: its blocks (out, bytes), or its values. rows: as ``head_rows``."""
    shape = tuple(blocks.shape)
    dtype = torch.uint8 if is_packed else FLOATS.get(blocks.ggml_type, torch.float32)
    scheme = None if is_packed or blocks.ggml_type in FLOATS else GgufBlocks("gguf", ggml_type=blocks.ggml_type)
    if scheme is not None:
        shape = (*shape[:-1], scheme.num_columns(shape[-1]))

    def read() -> Tensor:
        values: Tensor = blocks[:]
        if scheme is not None:
            values = scheme.dequantize({"weight": values}, shape, dtype)
        return values if rows is None else values[torch.from_numpy(np.argsort(rows))]

    return LazyTensor(dtype, shape, read)
