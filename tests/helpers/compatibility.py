"""Every kind of base with every method and target: cases to train, and whether lorakit refuses them.

docs/support.md shows the refusals; scripts/support_page.py writes it.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
)  # fmt: skip

from lorakit.base.loading import load_for_training
from lorakit.errors import LorakitError
from lorakit.lora import AdapterSpec, adapter_tensors, attach
from lorakit.ops.fuse import fuse_model
from lorakit.recipe import BaseSection
from tests.helpers.bases import make_base

BACKENDS = ("single", "ddp", "zero2", "zero3", "fsdp2")
SHAPE: dict[str, Any] = {
    "hidden_size": 36, "intermediate_size": 50, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 10,
    "attention_bias": True,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "floats": {"base": "plain"},
    "floats, tied head": {"base": "tied"},
    "floats, Conv1D": {"base": "conv1d"},
    "floats, experts": {"base": "experts"},
    "nf4": {"base": "plain", "quantize": "nf4"},
    "fp4": {"base": "plain", "quantize": "fp4"},
    "int8": {"base": "plain", "quantize": "int8"},
    "fp8": {"base": "plain", "quantize": "fp8"},
    "nf4 in its files": {"base": "files"},
    "nf4, experts": {"base": "experts", "quantize": "nf4"},
    "nf4, Conv1D": {"base": "conv1d", "quantize": "nf4"},
}
FEATURES: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"method": "rslora"},
    "lora_fa": {"method": "lora_fa"},
    "dora": {"method": "dora"},
    "rsdora": {"method": "rsdora"},
    "init: pissa": {"init": "pissa"},
    "init: olora": {"init": "olora"},
    "dora, init: pissa": {"method": "dora", "init": "pissa"},
    "embedding": {"targets": ["EMBEDDING", "ATTENTION"]},
    "output head": {"targets": ["lm_head", "ATTENTION"], "tied_head": "untie"},
    "bias: all": {"bias": "all"},
    "modules_to_save": {"modules_to_save": ["NORM"]},
    "trainable_tokens": {"trainable_tokens": [10, 11, 12]},
    "new_tokens": {"new_tokens": {"so so": 3200, "say 1": 3201}},
    "target_parameters": {"target_parameters": "all-experts"},
}
MODULES_OF = {"conv1d": {"EMBEDDING": "wpe", "ATTENTION": "c_attn", "NORM": "ln_f"}}
USUAL_MODULES = {"EMBEDDING": "embed_tokens", "ATTENTION": "q_proj", "NORM": "model.norm"}
EXPERTS = [kind for kind, settings in KINDS.items() if settings["base"] == "experts"]
ABSENT = {  # features of layers that a kind of base does not have
    *((kind, "target_parameters") for kind in KINDS if kind not in EXPERTS),
    *((kind, "bias: all") for kind in EXPERTS), ("floats, tied head", "embedding"),
}  # fmt: skip


def make_bases(folder: Path, tokenizer: Any) -> None:
    """Write one small random base of each kind."""
    make_base(folder / "plain", tokenizer, **SHAPE | {"intermediate_size": 5000})  # quantised, it is mostly bytes
    make_base(folder / "tied", tokenizer, **SHAPE, tie_word_embeddings=True)
    small = {"vocab_size": len(tokenizer), "initializer_range": 0.1}
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    torch.manual_seed(0)
    models = {
        "conv1d": GPT2LMHeadModel(GPT2Config(n_embd=36, n_layer=2, n_head=3, n_positions=256, **small, **no_dropout)),
        "experts": MixtralForCausalLM(
            MixtralConfig(
                hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                num_local_experts=3, num_experts_per_tok=2, **small,
            )
        ),
        "files": AutoModelForCausalLM.from_pretrained(
            folder / "plain", dtype=torch.float32, device_map="cpu",
            quantization_config=BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
            ),
        ),
    }  # fmt: skip
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def case_of(kind: str, feature: str) -> dict[str, Any]:
    """Return the settings of a cell, as tests.helpers.ranks reads them."""
    names = USUAL_MODULES | MODULES_OF.get(KINDS[kind]["base"], {})
    adapter = {
        key: [names.get(name, name) for name in value]
        if isinstance(value, list) and key != "trainable_tokens"
        else value
        for key, value in FEATURES[feature].items()
    }
    return {"name": f"{kind}/{feature}".replace("/", "-").replace(" ", "_"), **KINDS[kind], "adapter": adapter}


def refusal(folder: Path, kind: str, feature: str) -> str | None:
    """Return why lorakit refuses the cell, or None once every tensor of the adapter has a finite gradient."""
    case = case_of(kind, feature)
    base = folder / case["base"]
    section = BaseSection(model="base", quantize=case.get("quantize", "none"))
    settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in case["adapter"].items()}
    spec = AdapterSpec(rank=3, **settings)
    try:
        model = load_for_training(section, base, torch.float32, torch.device("cpu"), sharded=False).model
        attach(model, spec, 0)
        fuse_model(model)
    except LorakitError as problem:
        return str(problem).replace(f"{base}: ", "")
    torch.manual_seed(1)
    for tensor in adapter_tensors(model).values():
        tensor.data += 0.05 * torch.randn_like(tensor)
    ids = torch.tensor([*spec.new_tokens.values(), *range(8, 32)][:24]).reshape(2, 12)
    model(input_ids=ids).logits.square().mean().backward()
    for name, tensor in adapter_tensors(model).items():
        assert tensor.grad is not None, name
        assert tensor.grad.isfinite().all(), name
        assert tensor.grad.abs().max() > 0, name
    return None


def refusals(folder: Path) -> dict[tuple[str, str], str | None]:
    """Try every cell but the absent ones, which have None."""
    return {
        (kind, feature): None if (kind, feature) in ABSENT else refusal(folder, kind, feature)
        for kind in KINDS
        for feature in FEATURES
    }
