"""Shrink the config of any architecture: its own defaults with few, narrow layers, one of each kind that it has."""

from collections.abc import Mapping
from typing import Any, Final

WIDTH: Final = 64
HEADS: Final = 4
EXPERTS: Final = 4
LAYERS: Final = 2

NUM_LAYERS: Final = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers")
SIZES: Final[dict[str, Any]] = {
    key: size
    for size, keys in {
        LAYERS: " ".join(NUM_LAYERS),
        WIDTH: "hidden_size d_model n_embd dim_model embedding_size emb_dim word_embed_proj_dim"
        " input_embedding_size hidden_size_per_layer_input lru_width text_hidden_size out_hidden_size embedding_dim"
        " moe_hidden_size projector_hidden_size adapter_in_dim adapter_out_dim adapter_input_size",
        96: "intermediate_size ffn_dim d_ff dim_ff n_inner dff ffn_hidden_size decoder_ffn_dim encoder_ffn_dim"
        " intermediate_size_mlp dense_intermediate_size",
        32: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size shared_intermediate_size"
        " moe_shared_expert_intermediate_size moe_latent_size share_expert_dim shared_experts_intermediate_size",
        HEADS: "num_sliding_attention_heads linear_num_heads num_attention_heads n_head n_heads num_heads"
        " decoder_attention_heads encoder_attention_heads linear_num_value_heads num_experts n_routed_experts"
        " num_local_experts moe_num_experts num_routed_experts",
        2: "num_key_value_heads n_kv_heads num_kv_heads linear_num_key_heads num_query_groups n_mamba_heads"
        " num_experts_per_tok num_experts_per_token moe_k moe_topk top_k_experts moe_top_k index_n_heads",
        16: "linear_head_dim head_dim v_head_dim linear_key_head_dim linear_value_head_dim attention_head_dim"
        " q_lora_rank kv_lora_rank o_lora_rank state_size mamba_d_state ssm_state_size mamba_d_head mamba_head_dim"
        " sliding_window window_size attention_window_size",
        8: "qk_rope_head_dim qk_nope_head_dim rotary_dim index_head_dim mamba_n_heads mamba_num_heads",
        1: "n_group topk_group num_expert_group n_shared_experts num_shared_experts first_k_dense_replace"
        " num_dense_layers mamba_n_groups n_groups",
        128: "mamba_d_ssm",
        512: "max_position_embeddings n_positions max_target_positions index_topk",
        0: "num_kv_shared_layers",
    }.items()
    for key in keys.split()
}
"""key of a config -> its size here, wherever a config has the key with a number"""


FILLED: Final = ("head_dim", "num_key_value_heads", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts")
"""keys whose None some models cannot compute with"""
LATENT: Final = {"head_dim": 8, "num_key_value_heads": HEADS}  # with latent attention: the rotary width, and no groups
MROPE: Final = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
OWN: Final[dict[str, dict[str, Any]]] = {
    "bamba": {"attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": 3}},
    "cohere_compass_text": {
        "rope_parameters": {
            f"{kind}_attention": {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full", "sliding")
        },
    },
    "cosmos3_edge_text": {"rope_parameters": MROPE | {"mrope_section": [4, 2, 2]}},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": EXPERTS, "moe_top_k": 2},
    },
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "head_dim": 16,
    },
    "deepseek_v2": {"topk_method": "greedy"},
    "dots1": {"n_routed_experts": EXPERTS, "num_experts_per_tok": 2},
    "dots3_note_text": {"head_dim": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 12, "per_layer_config": {}},
    "ernie4_5_vl_moe_text": {"rope_parameters": MROPE | {"mrope_section": [3, 3, 2]}},
    "gemma3n_text": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "vocab_size_per_layer_input": 64,
    },
    "glm4v_moe_text": {"rope_parameters": MROPE | {"mrope_section": [1, 1, 2]}},
    "glm4v_text": {"rope_parameters": MROPE},
    "glm5_next_text": {"qk_rope_head_dim": 0, "head_dim": 0, "qk_nope_head_dim": 16, "qk_head_dim": 16},
    "glm_ocr_text": {"rope_parameters": MROPE},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "granite4_vision": {"deepstack_layer_map": [[1, 0]], "downsample_rate": "2/4"},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "hunyuan_vl_text": {"rope_parameters": MROPE | {"mrope_section": [2, 2, 2, 2]}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"qk_head_dim": 16, "ffn_hidden_size": 96},
    "mamba2": {"num_heads": 8},
    "mistral4": {"head_dim": 16, "qk_head_dim": 16},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "muse_glimmer": {"out_hidden_size": 4 * WIDTH},
    "muse_spark": {"out_hidden_size": 4 * WIDTH},
    "muse_spark_audio": {"num_hidden_layers": 4, "hidden_sizes": [16] * 4},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 512,
        "indexer_compress_ratio": 4, "ngram_vocab_size_base": 100, "hc_lowrank": 16,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "paddleocr_vl_text": {"rope_parameters": MROPE},
    "qwen2_5_omni_text": {"rope_parameters": MROPE},
    "qwen2_5_vl_text": {"rope_parameters": MROPE},
    "qwen2_vl_text": {"rope_parameters": MROPE},
    "qwen2_vl_vision": {"embed_dim": WIDTH, "hidden_size": WIDTH, "depth": 2},
    "rwkv": {"attention_hidden_size": WIDTH},
    "step3p5": {
        "layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"],
        "sliding_window": 16,
        "rope_parameters": {
            f"{kind}_attention": {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full", "sliding")
        },
    },
    "xlnet": {"d_head": WIDTH // HEADS},
    "xlstm": {"mode": "train", "chunk_size": 1, "qk_dim_factor": 1.0, "num_blocks": LAYERS},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "zamba": {
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * WIDTH // HEADS, "mamba_dt_rank": 8,
    },
    "zamba2": {
        "mamba_headdim": 16, "n_mamba_heads": 8, "mamba_ngroups": 1, "attention_hidden_size": 2 * WIDTH,
        "attention_head_dim": 2 * WIDTH // HEADS, "num_query_groups": HEADS, "adapter_rank": 8, "hybrid_layer_ids": [1],
    },
}  # fmt: skip
"""architecture -> what its small config needs besides"""


def shrink(values: Mapping[str, Any], vocabulary: int, tokens: Mapping[str, int]) -> dict[str, Any]:
    """Return a config's values in small. vocabulary: tokens that it has. tokens: ids of bos, eos and pad by their key.

    Lists of a value for each layer keep the first layer of each kind, so that a hybrid stays one.
    """
    kept = _kept_layers(values)
    count = next((values[key] for key in NUM_LAYERS if values.get(key)), None)
    small = {key: _small(key, value, kept, count, vocabulary, tokens) for key, value in values.items()}
    if "is_decoder" in small and not values.get("is_encoder_decoder"):
        small["is_decoder"] = True  # as BERT and its relatives need it
    if values.get("kv_lora_rank"):
        small |= {key: value for key, value in LATENT.items() if key in small}
    return small | OWN.get(str(values.get("model_type")), {})


def _small(key: str, value: Any, kept: list[int], count: int | None, vocabulary: int, tokens: Mapping[str, int]) -> Any:
    """Return one value of a config in small. kept: the layers that stay of ``count``; empty for the first LAYERS."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if key == "per_layer_config" and isinstance(value, Mapping):
        return {str(new): value[str(old)] for new, old in enumerate(kept) if str(old) in value}
    if isinstance(value, Mapping) and key.endswith("_config") and key != "quantization_config":
        return shrink(value, vocabulary, tokens)
    if kept and isinstance(value, list) and len(value) == count:
        return [value[index] for index in kept]
    if key in NUM_LAYERS and is_number:
        return len(kept) or LAYERS
    if key in SIZES and (is_number or (value is None and key in FILLED)):
        return SIZES[key]
    return _token(key, value, vocabulary, tokens)


def _token(key: str, value: Any, vocabulary: int, tokens: Mapping[str, int]) -> Any:
    if key == "vocab_size" or key.startswith("vocab_size_"):
        return vocabulary
    is_token = key.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    return tokens.get(key, 0 if is_token and value >= vocabulary else value)


def _kept_layers(values: Mapping[str, Any]) -> list[int]:
    """Return the first layer of each kind, and two at least; empty if the config lists no kinds."""
    kinds = values.get("layer_types") or values.get("layers_block_type") or values.get("block_types")
    if not kinds or not isinstance(kinds, list):
        return []
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    more = [index for index in range(len(kinds)) if index not in first]
    return sorted(first + more[: max(0, LAYERS - len(first))])
