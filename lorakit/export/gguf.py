"""Write a base, such as a merged model, and adapters as GGUF files, which llama.cpp reads.

Invariant: what is written is read back as the same model: a config or a tokenizer for which a GGUF has no words is
refused. Adapters keep their float32 values, and weights the bits of their files; norms and biases become float32.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from lorakit.base.gguf import (
    LLAMA3,
    ROPE_FACTORS,
    LazyTensor,
    check_same_tensors,
    gguf_config,
    gguf_settings,
    head_rows,
    renamed,
    rope_factors,
    tensor_names,
)
from lorakit.base.gguf_tokenizer import write_tokenizer
from lorakit.base.transformers_io import load_config, load_tokenizer
from lorakit.errors import BaseModelError
from lorakit.files.atomic import atomic_folder
from lorakit.files.base_files import open_base_files
from lorakit.files.safetensors import CODE_OF_DTYPE, tensor_bytes
from lorakit.patch import Patch
from lorakit.patch.compatibility import check_compatible
from lorakit.quant.files import quantization_config

BASE_FILE: Final = "base.gguf"
CONVERTERS: Final = (
    "llama.cpp's own converters know more kinds: in its folder, with its requirements installed, python3"
    " convert_hf_to_gguf.py {folder} --outfile base.gguf; for an adapter python3 convert_lora_to_gguf.py PATCH --base"
    " {folder} --outtype f32 --outfile adapter.gguf; then llama-server --jinja -m base.gguf --lora adapter.gguf"
)
NOT_COMPUTED: Final = {
    "_name_or_path", "architectures", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "pad_token_id", "quantization_config", "transformers_version", "use_cache",
}  # fmt: skip
"""keys of a config that no product depends on; llama.cpp has the tokens from the tokenizer"""


def export_gguf(base: Path, folder: Path, patches: Mapping[str, Patch], out: Path, ends: Sequence[int] = ()) -> Path:
    """Write ``out``: base.gguf and a file for each adapter; returns the base's file, of a GGUF base its own.

    base: as the user names it. folder: the base's. ends: the tokens that end an answer.
    Raises PatchError, BaseModelError: llama.cpp would compute something else; nothing is written then.
    """
    is_gguf = base.suffix == ".gguf" and base.is_file()
    try:
        config = _checked_config(folder)
        if is_gguf and not patches:
            raise BaseModelError("is a GGUF file already, and no adapter is named")
        check_compatible(patches, "llama.cpp", "merge them into the base (lorakit merge), and export the merged model")
        with atomic_folder(out) as staging:
            if not is_gguf:
                _write_base(staging / BASE_FILE, folder, config, ends)
            for name, patch in patches.items():
                _write_adapter(staging / f"{name}.gguf", patch, config)
    except BaseModelError as problem:
        raise BaseModelError(f"{folder}: {problem}. {CONVERTERS.format(folder=folder)}") from None
    return base if is_gguf else out / BASE_FILE


def _checked_config(folder: Path) -> dict[str, Any]:
    """Return a base's config as transformers completes it. Raises BaseModelError: a GGUF would lose something of it."""
    config = load_config(folder)
    own = config.to_dict()
    own.setdefault("head_dim", own["hidden_size"] // own["num_attention_heads"])  # which Qwen2's config lacks
    settings = gguf_settings(own)
    rope = own["rope_parameters"]
    factors = rope_factors(LLAMA3 | rope, own["head_dim"]) if rope["rope_type"] == "llama3" else None
    tensors = set() if own["tie_word_embeddings"] else {"output.weight"}
    read = type(config)(**gguf_config(settings, tensors, factors)).to_dict()
    for key in sorted((own.keys() | read.keys()) - NOT_COMPUTED):
        if own.get(key) != read.get(key):
            raise BaseModelError(f"config.json: {key} is {own.get(key)!r}, and a GGUF file says {read.get(key)!r} here")
    names = {own: stored for stored, own in tensor_names(own["num_hidden_layers"]).items()}
    return {**own, "factors": factors, "names": names}


def _write_base(path: Path, folder: Path, config: Mapping[str, Any], ends: Sequence[int]) -> None:
    if quantization_config(folder) is not None:
        raise BaseModelError(f"is quantised; write it in floats first: lorakit merge {folder} --out FLOATS")
    files = open_base_files(folder)
    settings = gguf_settings(config) | write_tokenizer(load_tokenizer(folder), config["vocab_size"])
    further = [token for token in ends if token != settings.get("tokenizer.ggml.eos_token_id")]
    if len(further) > 2:
        raise BaseModelError(f"answers end with tokens {', '.join(map(str, ends))}, and a GGUF file names three")
    # the last first: it is that of the chat template, where the base's own lacks one
    settings |= dict(zip(("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"), further[::-1], strict=False))
    stored = {name: files.entry(name) for name in files.shard_of}
    if config["tie_word_embeddings"]:
        stored.pop("lm_head.weight", None)
    check_same_tensors(folder, {name: entry.shape for name, entry in stored.items()})
    if others := {entry.dtype for entry in stored.values()} - {torch.float32, torch.float16, torch.bfloat16}:
        raise BaseModelError(f"tensors in {', '.join(map(str, others))}; a GGUF file of this kind has none")
    tensors: dict[str, LazyTensor] = {}
    for name, entry in stored.items():
        dtype = entry.dtype if len(entry.shape) == 2 else torch.float32
        rows = head_rows(name.rpartition(".")[0], config)
        tensors[renamed(name, config["names"])] = LazyTensor(
            dtype, entry.shape, partial(_read, partial(files.shard_of[name].read, name), dtype, rows)
        )
    if (factors := config["factors"]) is not None:
        tensors[ROPE_FACTORS] = LazyTensor(torch.float32, factors.shape, lambda: torch.from_numpy(factors))
    _write(path, {"general.type": "model", **settings}, tensors)


def _write_adapter(path: Path, patch: Patch, config: Mapping[str, Any]) -> None:
    tensors: dict[str, LazyTensor] = {}
    for module, layer in patch.layers.items():
        if layer.embedding or (config["tie_word_embeddings"] and module == "lm_head"):
            raise BaseModelError(f"llama.cpp takes no adapter of {module}; merge it first (lorakit merge)")
        for part, rows in (("lora_A", None), ("lora_B", head_rows(module, config))):
            value = layer.tensors[part]
            stored = f"{renamed(f'{module}.weight', config['names'])}.{part.lower()}"
            tensors[stored] = LazyTensor(torch.float32, value.shape, partial(_read, value.float, torch.float32, rows))
    settings = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": float(patch.config.alpha)}
    _write(path, {"general.architecture": config["model_type"], **settings}, tensors)


def _read(read: Callable[[], Tensor], dtype: torch.dtype, rows: np.ndarray | None) -> Tensor:
    value = read().to(dtype)
    return value if rows is None else value[torch.from_numpy(rows)]


def _write(path: Path, settings: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> None:
    """Write a GGUF file, one tensor in memory at a time."""
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(path, settings["general.architecture"])
    for key, value in settings.items():
        if key == "general.architecture":  # the writer's own
            continue
        add: Any = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    writer.add_quantization_version(2)
    for name, one in tensors.items():
        kind = GGMLQuantizationType[CODE_OF_DTYPE[one.dtype]]
        num_bytes = math.prod(one.shape) * one.dtype.itemsize
        # a numpy dtype that the writer leaves alone: it has no bfloat16
        writer.add_tensor_info(name, one.shape, np.dtype(np.int8), num_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for one in tensors.values():
        writer.write_tensor_data(np.frombuffer(tensor_bytes(one.read()), np.uint8))
    writer.close()
