"""How llama.cpp writes a model of transformers into a GGUF file: names of tensors, settings, and the order of rows.

Each kind of model here is known in full: a setting or a tensor without a place in these tables is refused, because a
model without it would compute something else. Sources: llama.cpp's conversion/*.py and gguf's table of tensor names.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np

from lorakit.errors import BaseModelError

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
FORMS: Final[Mapping[str, str]] = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
}  # fmt: skip
"""model_type of config.json, which is the architecture in a GGUF too -> its class"""
PAIRED: Final = ("llama",)  # kinds in whose heads the rows of queries and keys that rotate together are neighbours


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
    if architecture not in FORMS:
        raise BaseModelError(f"a {architecture}; lorakit reads GGUF files of {', '.join(FORMS)}")
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
        "architectures": [FORMS[architecture]], "model_type": architecture, "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in tensors, **config, **tokens,
    }  # fmt: skip


def gguf_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a GGUF's settings of a config.json as transformers completes it. Raises BaseModelError: another kind."""
    if config["model_type"] not in FORMS:
        raise BaseModelError(f"a {config['model_type']}; lorakit writes GGUF files of {', '.join(FORMS)}")
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
