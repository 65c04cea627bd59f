"""Patches made for tests, by lorakit and by PEFT, and the updates that they stand for."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from lorakit.base.transformers_io import load_base
from lorakit.lora import adapter_tensors, inject
from lorakit.lora.own_head import add_own_head
from lorakit.patch import read_patch, save_patch
from tests.helpers.models import build
from tests.helpers.rounding import nearest

CPU = torch.device("cpu")
IDS = torch.arange(4, 40)[None]
TENSORS = "adapter_model.safetensors"


def make_patch(base: Path, folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> Path:
    """Save a patch whose tensors are all random, as after training; ``options`` are those of `inject`."""
    model = inject(load_base(base, dtype, CPU), **{"rank": 4, "alpha": 6} | options)
    return _save_random(model, folder, seed)


def make_embedding_patch(base: Path, folder: Path) -> Path:
    """Write a patch of another program that embeds by the mean of 32 values, with sentence-transformers' files."""
    make_patch(base, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"task_type": "FEATURE_EXTRACTION"}))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text('{"word_embedding_dimension": 32, "pooling_mode": "mean"}')
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling")]
    (folder / "modules.json").write_text(json.dumps([{"type": kind, "path": path} for kind, path in kinds]))
    return folder


def make_head_patch(base: Path, folder: Path, num_values: int, seed: int = 0) -> Path:
    """The same with a head of its own."""
    model = inject(load_base(base, torch.float32, CPU), rank=4, alpha=6)
    add_own_head(model, num_values, seed)
    return _save_random(model, folder, seed)


def _save_random(model: torch.nn.Module, folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    for tensor in adapter_tensors(model).values():
        tensor.data.normal_(std=0.1)
    return save_patch(model, folder)


def exact(W: torch.Tensor, *updates: tuple[Path, str, float]) -> torch.Tensor:
    """Return W plus the weighted updates (patch, module, weight), summed in float64 and rounded once."""
    total = W.double()
    for folder, module, weight in updates:
        layer = read_patch(folder).layers[module]
        V = W.double() + layer.scale * (layer.tensors["lora_B"].double() @ layer.tensors["lora_A"].double())
        if not layer.plain:
            V = layer.tensors["lora_magnitude_vector"].double()[:, None] * V / V.norm(dim=1, keepdim=True)
        total = total + weight * (V - W.double())
    return nearest(total, W.dtype)


def deltas(folder: Path) -> dict[str, Tensor]:
    """Return module -> s B A, dense in float64."""
    layers = read_patch(folder).layers
    return {
        name: layer.scale * (layer.tensors["lora_B"].double() @ layer.tensors["lora_A"].double())
        for name, layer in layers.items()
    }


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).detach().norm() / expected.detach().norm())


def without_facts(folder: Path, copy: Path, change: Any = lambda facts: facts.clear()) -> Path:
    """Copy a patch without lorakit's metadata, or with changed metadata."""
    shutil.copytree(folder, copy)
    facts = dict(read_patch(folder).metadata)
    change(facts)
    metadata = {"format": "pt"} | ({"lorakit": json.dumps(facts)} if facts else {})
    save_file(load_file(copy / TENSORS), copy / TENSORS, metadata=metadata)
    (copy / "lorakit.json").unlink(missing_ok=True)
    return copy


def peft_model(
    architecture: str, name: str = "default", *, tie: bool | None = None, seed: int = 0, **config: Any
) -> Any:
    """Return a PEFT model with every saved tensor changed, as after training."""
    base = build(architecture, seed)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **config), adapter_name=name).eval()
    torch.manual_seed(7)
    for key, parameter in model.named_parameters():
        trained = (
            "lora_" in key
            or "modules_to_save" in key
            or (config.get("bias", "none") != "none" and key.endswith("bias"))
        )
        if trained and parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model


def save_peft_patch(
    folder: Path, architecture: str, tokenizer: Any, name: str = "default", **config: Any
) -> tuple[Path, Path, Any]:
    """Save a base and a PEFT adapter on it; return base folder, patch folder and the PEFT model."""
    base = folder / "base"
    build(architecture).save_pretrained(base)
    tokenizer.save_pretrained(base)
    model = peft_model(architecture, name, **config)
    model.save_pretrained(folder / "patch")
    return base, folder / "patch" / ("" if name == "default" else name), model


def save_trained_peft(folder: Path, base: Path, kind: Any = AutoModelForCausalLM, **config: Any) -> Any:
    """Save a PEFT adapter on a base of a class with every trainable tensor changed, and return the PEFT model."""
    model = get_peft_model(kind.from_pretrained(base), LoraConfig(**config)).eval()
    torch.manual_seed(3)
    for key, tensor in model.named_parameters():
        if tensor.requires_grad and ("lora_" in key or "modules_to_save" in key):
            tensor.data.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(str(folder))
    return model
