"""Small random bases, as folders, and the tensors in a folder."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM


def make_base(folder: Path, tokenizer: Any, *, seed: int = 0, **settings: Any) -> Path:
    """Write a random Llama with the built-in tokenizer; ``settings`` are keys of its config."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": len(tokenizer), "max_position_embeddings": 256, "initializer_range": 0.1,
            "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id, **settings,
        }
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
