"""Random bases and patches of named shapes: made on a device, or once per scratch folder as files."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lorakit.base.find import find_base
from lorakit.base.transformers_io import load_skeleton, load_tokenizer
from lorakit.files.safetensors import dtype_name
from lorakit.lora import AdapterSpec, find_targets
from lorakit.lora.targets import Target
from lorakit.quant.linear import QuantizationInfo, QuantLinear
from lorakit.quant.schemes import QuantScheme

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 3200},
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
             "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True},
    "100M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 12,
             "num_key_value_heads": 4, "vocab_size": 32000},
    "1.1B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
             "num_key_value_heads": 4, "vocab_size": 32000},
    "4B": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 36, "num_attention_heads": 24,
           "num_key_value_heads": 8, "vocab_size": 32000},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip


def make_base(folder: Path, shape: str, dtype: torch.dtype, *, shard: str = "500MB") -> Path:
    """A random Llama of a named shape with the built-in tokenizer; kept for the next run."""
    target = folder / f"base-{shape}-{dtype_name(dtype)}"
    if not (target / "config.json").exists():
        torch.manual_seed(0)
        with torch.device("cpu"):
            torch.set_default_dtype(dtype)
            model = LlamaForCausalLM(LlamaConfig(**SHAPES[shape], max_position_embeddings=16384))
            torch.set_default_dtype(torch.float32)
        model.to(dtype).save_pretrained(target, max_shard_size=shard)
        load_tokenizer(find_base("builtin:tiny")).save_pretrained(target)
    return target


def hollow(shape: str, dtype: torch.dtype) -> Any:
    """A Llama of a named shape without its weights."""
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=131072)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def make_model(shape: str, dtype: torch.dtype, device: torch.device, packing: QuantScheme | None = None) -> Any:
    """A random Llama made on a device weight by weight, its linear layers packed as they are made; no files."""
    model = hollow(shape, dtype)
    numbers = torch.Generator(device).manual_seed(0)
    made: dict[int, nn.Parameter] = {}  # a tied weight is made once
    for name, module in list(model.named_modules()):
        for key, old in list(module.named_parameters(recurse=False)):
            if id(old) not in made:
                value = torch.ones(old.shape, dtype=dtype, device=device)
                if old.dim() > 1:
                    value.normal_(0, 0.02, generator=numbers)
                if packing is not None and isinstance(module, nn.Linear) and name != "lm_head":
                    facts = QuantizationInfo(packing, (module.out_features, module.in_features), dtype)
                    model.set_submodule(name, QuantLinear(facts, packing.quantize(value), None))
                    continue
                made[id(old)] = nn.Parameter(value, requires_grad=False)
            module._parameters[key] = made[id(old)]
    with torch.device(device):  # its frequencies are no parameter
        model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
    return model


def random_adapter(targets: Iterable[Target], rank: int, seed: int, size: float = 1e-3) -> dict[str, Tensor]:
    """A and B of every target, entries of B about ``size``; in float32 on the CPU."""
    g = torch.Generator().manual_seed(seed)
    found = {}
    for one in targets:
        found[f"{one.name}.lora_A"] = torch.randn(rank, one.in_features, generator=g) / rank
        found[f"{one.name}.lora_B"] = torch.randn(one.out_features, rank, generator=g) * size
    return found


def make_patch(folder: Path, base: Path, *, rank: int, seed: int, targets: Any = "all-linear") -> Path:
    """A patch of random A and B on a base's linear layers; kept for the next run."""
    target = folder / f"patch-{base.name}-r{rank}-{seed}"
    if not (target / "adapter_config.json").exists():
        from lorakit.files.base_files import open_base_files
        from lorakit.patch import BaseIdentity, PatchLayer, fingerprint, new_patch, write_patch
        from lorakit.version import VERSION

        model = load_skeleton(base)
        found = find_targets(model, AdapterSpec(rank=rank, targets=targets))
        made = random_adapter(found, rank, seed)
        layers = {
            t.name: PatchLayer(
                "lora", rank, 2.0 * rank, (t.out_features, t.in_features),
                {key: made[f"{t.name}.{key}"] for key in ("lora_A", "lora_B")},
            )
            for t in found
        }  # fmt: skip
        facts = {"lorakit": VERSION, "base": fingerprint(BaseIdentity(open_base_files(base)), list(layers))}
        names = [name for name, _ in model.named_modules()]
        write_patch(target, new_patch(layers, metadata=facts, base_model=str(base), all_modules=names))
    return target


def flops(model: Any, lengths: Sequence[int], rank: int, label_share: float = 1.0) -> float:
    """Useful operations of a token in rows of these lengths: 4 P + 6 s h L + 6 P of the adapter.

    ``label_share``: share of tokens whose logits are needed.
    """
    config, targets = model.config, find_targets(model, AdapterSpec(rank=rank))
    products = sum(t.in_features * t.out_features for t in targets)
    head = config.vocab_size * config.hidden_size * label_share
    low_rank = sum(rank * (t.in_features + t.out_features) for t in targets)
    length = sum(one * one for one in lengths) / sum(lengths)
    attention = 6.0 * length * config.hidden_size * config.num_hidden_layers
    return float(4.0 * (products + head) + attention + 6.0 * low_rank)
