"""Copies of a model with other values, as after fine-tuning."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"
NORM = "model.layers.0.input_layernorm.weight"
Q = "model.layers.0.self_attn.q_proj"


def copy_changed(base: Path, folder: Path, change: Callable[[dict[str, Tensor]], object], **config: Any) -> Path:
    """Copy a model with changed tensors and settings."""
    shutil.copytree(base, folder)
    tensors = load_file(base / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    if config:
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(settings | config))
    return folder


def add_noise(*names: str) -> Callable[[dict[str, Tensor]], object]:
    """Return a function that adds noise to some tensors."""

    def change(tensors: dict[str, Tensor]) -> None:
        generator = torch.Generator().manual_seed(1)
        for name in names:
            tensors[name] += 0.1 * torch.randn(tensors[name].shape, generator=generator)

    return change
