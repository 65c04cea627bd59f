"""Random bases and patches of named shapes, made once per scratch folder."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 3200},
    "100M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 12,
             "num_key_value_heads": 4, "vocab_size": 32000},
    "1.1B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
             "num_key_value_heads": 4, "vocab_size": 32000},
    "4B": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 36, "num_attention_heads": 24,
           "num_key_value_heads": 8, "vocab_size": 32000},
}  # fmt: skip


def make_base(folder: Path, shape: str, dtype: torch.dtype, *, shard: str = "500MB") -> Path:
    """A random Llama of a named shape with the built-in tokenizer; kept for the next run."""
    from lorakit.model import find_base, load_tokenizer

    target = folder / f"base-{shape}-{str(dtype).removeprefix('torch.')}"
    if not (target / "config.json").exists():
        torch.manual_seed(0)
        with torch.device("cpu"):
            torch.set_default_dtype(dtype)
            model = LlamaForCausalLM(LlamaConfig(**SHAPES[shape]))
            torch.set_default_dtype(torch.float32)
        model.to(dtype).save_pretrained(target, max_shard_size=shard)
        load_tokenizer(find_base("builtin:tiny")).save_pretrained(target)
    return target


def make_patch(folder: Path, base: Path, *, rank: int, seed: int, targets: Any = "all-linear") -> Path:
    """A patch with random A and B (B non-zero) on a base's linear layers, in float32."""
    from lorakit.lora import AdapterSpec, find_targets
    from lorakit.model import load_skeleton
    from lorakit.patch import PatchLayer, fingerprint, new_patch, open_base_files, write_patch
    from lorakit.version import VERSION

    target = folder / f"patch-{base.name}-r{rank}-{seed}"
    if not (target / "adapter_config.json").exists():
        model = load_skeleton(base)
        g = torch.Generator().manual_seed(seed)
        layers = {
            t.name: PatchLayer(
                "lora", rank, 2.0 * rank, (t.out_features, t.in_features),
                {"lora_A": torch.randn(rank, t.in_features, generator=g) / rank,
                 "lora_B": torch.randn(t.out_features, rank, generator=g) * 1e-3},
            )
            for t in find_targets(model, AdapterSpec(rank=rank, targets=targets))
        }  # fmt: skip
        facts = {"lorakit": VERSION, "base": fingerprint(open_base_files(base), list(layers))}
        names = [name for name, _ in model.named_modules()]
        write_patch(target, new_patch(layers, facts=facts, base_model=str(base), all_modules=names))
    return target
