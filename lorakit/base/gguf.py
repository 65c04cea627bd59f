"""Read a GGUF file as a base: a model folder in the user's cache, made once, in which blocks stay as they are.

Weights of linear layers keep llama.cpp's 2 to 8 bits (quant/gguf.py); what is looked up by rows, the embedding and the
head, becomes floats.
"""

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lorakit.base.gguf_form import FORMS, ROPE_FACTORS, gguf_config, head_rows, module_name
from lorakit.base.gguf_tokenizer import read_tokenizer
from lorakit.base.transformers_io import WHY_NO_TOKENIZER
from lorakit.errors import BaseModelError
from lorakit.files.atomic import atomic_folder, file_signature, write_json
from lorakit.files.base_files import SINGLE
from lorakit.files.cache import cache_folder
from lorakit.files.safetensors import header_bytes, tensor_bytes
from lorakit.quant.gguf import PACKED

VERSION: Final = 1  # of the folders; another one makes them anew
END_TOKENS: Final = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class LazyTensor(NamedTuple):
    """A tensor that is to be written: its dtype, its shape, and what reads it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def open_gguf(file: Path) -> Path:
    """Return the model folder of a GGUF file, made if need be.

    Raises BaseModelError: damaged, or of another kind of model. TemporaryFailure: the disk is full.
    """
    key = hashlib.sha256(f"{VERSION} {file.resolve()} {file_signature(file)}".encode()).hexdigest()[:16]
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
    except ImportError:
        raise BaseModelError(f"{file}: reading GGUF files needs a package: pip install 'lorakit[gguf]'") from None
    except BaseModelError as problem:
        raise BaseModelError(f"{file}: {problem}. Use the model it was made from") from None
    except (KeyError, ValueError, IndexError, TypeError, OverflowError, AttributeError, AssertionError) as problem:
        raise BaseModelError(f"{file}: not a complete GGUF file: {type(problem).__name__}: {problem}") from None


def _write_folder(file: Path, folder: Path) -> None:
    from gguf import GGUFReader

    reader: Any = GGUFReader(str(file))
    settings = {name: field.contents() for name, field in reader.fields.items()}
    if settings.get("split.count", 1) > 1:
        raise BaseModelError("one of several parts; join them first (llama-gguf-split --merge)")
    stored = {tensor.name: tensor for tensor in reader.tensors}
    factors = stored.pop(ROPE_FACTORS).data if ROPE_FACTORS in stored else None
    config = gguf_config(settings, stored.keys(), factors)
    form = FORMS[config["model_type"]]
    tensors = {
        own: _lazy_tensor(stored[name], head_rows(own.rpartition(".")[0], config, form))
        for name in stored
        for own in [module_name(name)]
    }
    types = {module_name(name).removesuffix(".weight"): _kind(one) for name, one in stored.items() if _is_packed(one)}
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


def _kind(tensor: Any) -> str:
    return str(tensor.tensor_type.name)


def _is_packed(tensor: Any) -> bool:
    """True for a weight of a layer whose blocks stay as they are."""
    return _kind(tensor) in PACKED and tensor.name.startswith("blk.") and len(tensor.shape) == 2


def _lazy_tensor(tensor: Any, rows: np.ndarray | None) -> LazyTensor:
    """Return a tensor as the folder has it: its blocks (out, bytes), or its values. rows: as ``head_rows``."""
    kind = _kind(tensor)
    is_packed = _is_packed(tensor)
    shape = tensor.data.shape if is_packed else tuple(int(size) for size in reversed(tensor.shape))
    dtype = torch.uint8 if is_packed else FLOATS.get(kind, torch.float32)

    def read() -> Tensor:
        from gguf.quants import dequantize

        data = tensor.data
        if rows is not None:
            data = np.empty_like(tensor.data)
            data[rows] = tensor.data
        if not is_packed and kind not in FLOATS:
            data = dequantize(data, tensor.tensor_type)
        return torch.from_numpy(np.array(data)).view(dtype).view(shape)

    return LazyTensor(dtype, shape, read)
