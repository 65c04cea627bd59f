"""Small random bases, as folders, and the tensors in a folder."""

import json
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


def make_embedding_base(folder: Path, tokenizer: Any, mode: str = "lasttoken", *, normalize: bool = True) -> Path:
    """Write a random Llama that is laid out for sentence-transformers, as Qwen3-Embedding is."""
    make_base(folder, tokenizer)
    kinds = {"Transformer": "", "Pooling": "1_Pooling", **({"Normalize": "2_Normalize"} if normalize else {})}
    modules = [{"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
               for index, (kind, path) in enumerate(kinds.items())]  # fmt: skip
    flags = {f"pooling_mode_{one}": one == f"{mode}{'_tokens' * (mode == 'mean')}" for one in
             ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")}  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, **flags, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
