"""Save the adapter of a model you trained in your own loop."""

from pathlib import Path

import torch
from torch import nn

from lorakit.errors import PatchError
from lorakit.lora.inject import adapted_layers, adapter_tensors, fixed_tensors
from lorakit.patch.fingerprint import fingerprint_live
from lorakit.patch.from_model import patch_from_model
from lorakit.patch.write import write_patch
from lorakit.version import VERSION


def save_patch(model: nn.Module, folder: str | Path, *, base_model: str | None = None, overwrite: bool = False) -> Path:
    """Write the adapter in ``model`` as a patch folder that lorakit and PEFT read; returns the folder.

    ``base_model``: the name others load the base by; taken from the model's config when not given.

    Raises:
        PatchError: no adapter, a tensor that is not finite, or a patch is there already and ``overwrite`` is off.
    """
    if not isinstance(model, nn.Module):
        raise PatchError(
            f"save_patch writes the adapter of a model from lorakit.inject, got a {type(model).__name__}; a patch that"
            " was loaded is a file already: copy its folder, or write_patch(folder, read_patch(path))"
        )
    names = [name for name, _ in adapted_layers(model)]
    held = adapter_tensors(model) | fixed_tensors(model)
    tensors = {name: tensor.detach().to("cpu", torch.float32) for name, tensor in held.items()}
    base_model = base_model or getattr(getattr(model, "config", None), "_name_or_path", None) or None
    facts = {
        "lorakit": VERSION,
        "base": fingerprint_live(model, names),
        "adapter": {"layers": len(names), **_settings(model)},
    }
    return write_patch(
        folder, patch_from_model(model, tensors, facts=facts, base_model=base_model), overwrite=overwrite
    )


def _settings(model: nn.Module) -> dict[str, str]:
    """Method, rank and alpha; several where layers differ."""
    layers = [layer for _, layer in adapted_layers(model)]
    return {
        key: ", ".join(sorted({f"{value:g}" if isinstance(value, float) else str(value) for value in values}))
        for key, values in (
            ("method", [layer.method for layer in layers]), ("rank", [layer.rank for layer in layers]),
            ("alpha", [layer.alpha for layer in layers]),
        )
    }  # fmt: skip
