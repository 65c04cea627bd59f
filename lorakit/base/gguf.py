"""Read a GGUF file as a base: a model folder in the user's cache, made once, in which blocks stay as they are.

Weights of linear layers keep llama.cpp's 2 to 8 bits (quant/schemes.py); the embedding and the head become floats.
Each kind of model here is known in full, names of tensors, settings and the order of rows: a setting or a tensor
without a place in these tables is refused, because a model without it would compute something else. Sources:
llama.cpp's conversion/*.py and gguf's table of tensor names.
"""

import hashlib
import math
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lorakit.base._internals import read_gguf
from lorakit.base.gguf_tokenizer import read_tokenizer
from lorakit.base.transformers_io import GENERATION_CONFIG, WHY_NO_TOKENIZER, load_skeleton
from lorakit.errors import BaseModelError, LorakitError
from lorakit.files.atomic import atomic_folder, cache_folder, file_signature, write_json
from lorakit.files.base_files import SINGLE
from lorakit.files.safetensors import header_bytes, tensor_bytes
from lorakit.patch.compatibility import GGUF_FORMS
from lorakit.quant.schemes import GgufBlocks

ENDS: Final = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
FLOATS: Final = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # by the number of a type in ggml.h
OUTER: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LEAVES: Final = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
"""module of a layer in a GGUF -> its name in transformers"""
SETTINGS: Final = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim", "vocab_size": "vocab_size",
}  # fmt: skip
"""setting of a GGUF, after the architecture's name -> key of config.json"""
FREQUENCY: Final = "rope.freq_base"
SAME_AS_HEAD: Final = ("attention.value_length", "rope.dimension_count")  # of which transformers knows the head's alone
ROPE_FACTORS: Final = "rope_freqs.weight"
LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""what a GGUF with Llama 3's frequencies does not name; all of Llama 3.1 to 3.3 have these"""
PAIRED: Final = ("llama",)  # kinds in whose heads the rows of queries and keys that rotate together are neighbours


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


def tensor_names(num_layers: int) -> dict[str, str]:
    """Return module of a GGUF -> its name in transformers."""
    layers = {f"blk.{n}.{leaf}": f"model.layers.{n}.{own}" for n in range(num_layers) for leaf, own in LEAVES.items()}
    return OUTER | layers


def renamed(name: str, names: Mapping[str, str]) -> str:
    """Return another name of a tensor, by its module's. Raises BaseModelError: an unknown module."""
    module, _, kind = name.rpartition(".")
    if module not in names:
        raise BaseModelError(f"tensor {name}: not known for this kind of model")
    return f"{names[module]}.{kind}"


def head_rows(module: str, config: Mapping[str, Any]) -> np.ndarray | None:
    """Return transformers' rows of a module's weight in the order in which a GGUF has them; None: the same."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(module.rpartition(".")[2])
    if heads is None or config["model_type"] not in PAIRED:
        return None
    rows = np.arange(config[heads] * config["head_dim"])
    return rows.reshape(config[heads], 2, -1).swapaxes(1, 2).reshape(-1)


def gguf_config(settings: Mapping[str, Any], tensors: Collection[str], factors: np.ndarray | None) -> dict[str, Any]:
    """Return the config.json of a GGUF. factors: of the frequencies. Raises BaseModelError, KeyError."""
    architecture = settings["general.architecture"]
    if architecture not in GGUF_FORMS:
        raise BaseModelError(f"a {architecture}; lorakit reads GGUF files of {', '.join(GGUF_FORMS)}")
    beginning = f"{architecture}."
    own = {key.removeprefix(beginning): value for key, value in settings.items() if key.startswith(beginning)}
    own.setdefault("attention.head_count_kv", own["attention.head_count"])
    own.setdefault("attention.key_length", own["embedding_length"] // own["attention.head_count"])
    if "vocab_size" not in own:
        own["vocab_size"] = len(settings["tokenizer.ggml.tokens"])
    rope = {"rope_type": "default", "rope_theta": _exact(own.pop(FREQUENCY, 10000.0))}
    for key in SAME_AS_HEAD:
        if own.pop(key, own["attention.key_length"]) != own["attention.key_length"]:
            raise BaseModelError(f"{beginning}{key}: another than {beginning}attention.key_length")
    if unknown := [key for key in own if key not in SETTINGS]:
        raise BaseModelError(f"setting {beginning}{unknown[0]}: not known for this kind of model")
    config = {name: _exact(own[key]) for key, name in SETTINGS.items()}
    if factors is not None:
        rope |= {"rope_type": "llama3", "factor": float(factors.max()), **LLAMA3}
        if not np.allclose(rope_factors(rope, config["head_dim"]), factors, rtol=1e-4):
            raise BaseModelError(f"{ROPE_FACTORS}: frequencies that are not Llama 3's")
    tokens = {name: settings.get(f"tokenizer.ggml.{name}") for name in ("bos_token_id", "eos_token_id")}
    return {
        "architectures": [GGUF_FORMS[architecture]], "model_type": architecture, "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in tensors, **config, **tokens,
    }  # fmt: skip


def gguf_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a GGUF's settings of a config.json as transformers completes it. Raises BaseModelError: another kind."""
    if config["model_type"] not in GGUF_FORMS:
        raise BaseModelError(f"a {config['model_type']}; lorakit writes GGUF files of {', '.join(GGUF_FORMS)}")
    architecture = config["model_type"]
    own = {key: config[name] for key, name in SETTINGS.items()}
    own[FREQUENCY] = float(config["rope_parameters"]["rope_theta"])  # llama.cpp reads no integer here
    own |= dict.fromkeys(SAME_AS_HEAD, config["head_dim"])
    return {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in own.items()}


def rope_factors(rope: Mapping[str, Any], head_dim: int) -> np.ndarray:
    """Return what Llama 3's rotary frequencies are divided by, (head_dim / 2,). rope: `rope_parameters`."""
    lengths = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (rope["original_max_position_embeddings"] / lengths - low) / (high - low)
    factors: np.ndarray = 1 / (smooth + (1 - smooth) / rope["factor"])
    return np.where(smooth >= 1, 1.0, np.where(smooth <= 0, rope["factor"], factors)).astype(np.float32)


def _exact(value: Any) -> Any:
    """Return a number; one that was rounded to float32 as it was written: 1e-5, not 9.9999997e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
