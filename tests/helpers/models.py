"""Small random models of many architectures, as transformers builds them."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

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
EXPERTS = SMALL | {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CAUSAL: dict[str, dict[str, Any]] = {
    name: settings for name, settings in ARCHITECTURES.items() if name not in ("bert", "t5")
} | {
    "qwen3_moe": EXPERTS | {"head_dim": 8},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 40},
    "bert": ARCHITECTURES["bert"] | {"is_decoder": True},
    "bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "ernie4_5_moe": EXPERTS | {"moe_num_experts": 4, "moe_k": 2},  # keeps the router in float32
    "gpt_oss": EXPERTS | {"head_dim": 8},  # keeps its norms in float32, for float16 only
    "deepseek_v3": EXPERTS  # a buffer that is stored, and kept in float32
    | {
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    },
    "inkling2_text": EXPERTS | {"head_dim": 8},  # weights that are interleaved while they are loaded
}  # fmt: skip
if "inkling2_text" not in CONFIG_MAPPING:  # an older transformers
    del CAUSAL["inkling2_text"]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SMALL),
    "llama_biased": ("llama", SMALL | {"attention_bias": True, "mlp_bias": True}),
    "llama_tied": ("llama", SMALL | {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", ARCHITECTURES["gpt2"]),
    "gpt2_untied": ("gpt2", ARCHITECTURES["gpt2"] | {"tie_word_embeddings": False}),
    "gemma3": ("gemma3_text", ARCHITECTURES["gemma3_text"] | {"tie_word_embeddings": False}),
    "mixtral": ("mixtral", EXPERTS),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"head_dim": 8, "decoder_sparse_step": 1}),
    "gpt_oss": ("gpt_oss", EXPERTS | {"head_dim": 8, "sliding_window": 8}),
}


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
    settings = {"decoder_input_ids": ids.flip(1)} if architecture == "t5" else {}
    result = model(input_ids=ids, **settings)
    output: torch.Tensor = result.last_hidden_state if architecture == "bert" else result.logits
    return output


def scrambled(architecture: str, **settings: Any) -> Any:
    """A model in which no two values are likely to be the same, norms, biases and stored buffers included."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **CAUSAL[architecture] | settings))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_(0, 0.3)
    return model.eval()


def build_variant(name: str) -> Any:
    torch.manual_seed(0)
    architecture, settings = VARIANTS[name]
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(architecture, **settings), attn_implementation="eager"
    )
    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.data.normal_(1.0, 0.1)  # biases and norms that differ from each other
    return model.eval()


def bare_model(model: Any) -> Any:
    """Return a model that was built here as an AdaptedModel without a tokenizer, to which no patch can be loaded."""
    from lorakit.inference.adapted_model import AdaptedModel
    from lorakit.inference.prompts import PromptCodec

    return AdaptedModel(model, PromptCodec(model, None), None)
