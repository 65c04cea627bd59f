"""Small random models of many architectures, as transformers builds them."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "qwen3": SMALL | {"head_dim": 8},
    "mistral": SMALL | {"sliding_window": 4},
    "gemma3_text": SMALL | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4},
    "phi3": SMALL,
    "olmo2": SMALL,
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2},
    "gpt_neox": {key: value for key, value in SMALL.items() if key != "num_key_value_heads"},
    "opt": {
        "vocab_size": 64, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 64, "word_embed_proj_dim": 32,
    },
    "bert": {key: value for key, value in SMALL.items() if key != "num_key_value_heads"},
    "t5": {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    "mixtral": SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


def build(architecture: str, seed: int = 0) -> Any:
    """A random model in float32 without dropout, in evaluation mode."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(architecture, **ARCHITECTURES[architecture])
    makers: dict[str, Callable[..., Any]] = {
        "bert": AutoModel.from_config, "t5": AutoModelForSeq2SeqLM.from_config,
    }  # fmt: skip
    return makers.get(architecture, AutoModelForCausalLM.from_config)(config).eval()


def outputs(model: Any, architecture: str) -> torch.Tensor:
    """The model's answer to fixed inputs."""
    ids = torch.arange(3, 27).reshape(2, 12) % 64
    if architecture == "t5":
        return model(input_ids=ids, decoder_input_ids=ids.flip(1)).logits
    result = model(input_ids=ids)
    return result.last_hidden_state if architecture == "bert" else result.logits
