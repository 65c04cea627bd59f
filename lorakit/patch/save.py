"""Save the adapter of a model you trained in your own loop."""

from pathlib import Path

import torch
from torch import nn

from lorakit.errors import PatchError
from lorakit.lora.inject import adapted_layers, adapter_tensors
from lorakit.patch.card import model_card
from lorakit.patch.config import CONFIG_FILE
from lorakit.patch.fingerprint import fingerprint_live
from lorakit.patch.patch import write_patch
from lorakit.version import VERSION


def save_patch(model: nn.Module, folder: str | Path, *, base_model: str | None = None, overwrite: bool = False) -> Path:
    """Write the adapter in ``model`` as a patch folder that lorakit and PEFT read; returns the folder.

    ``base_model``: the name others load the base by; taken from the model's config when not given.

    Raises:
        PatchError: no adapter, a tensor that is not finite, or a patch is there already and ``overwrite`` is off.
    """
    folder = Path(folder)
    if (folder / CONFIG_FILE).exists() and not overwrite:
        raise PatchError(f"{folder}: holds a patch already; choose another folder or pass overwrite=True")
    if (folder / "README.md").exists() and not (folder / CONFIG_FILE).exists():
        raise PatchError(f"{folder}: holds a README.md that would be replaced by the model card; choose another folder")
    names = [name for name, _ in adapted_layers(model)]
    tensors = {name: tensor.detach().to("cpu", torch.float32) for name, tensor in adapter_tensors(model).items()}
    base_model = base_model or getattr(getattr(model, "config", None), "_name_or_path", None) or None
    facts = {
        "lorakit": VERSION,
        "base": fingerprint_live(model, names),
        "adapter": {"layers": len(names), **_settings(model)},
    }
    write_patch(
        folder, model, tensors, facts=facts, base_model=base_model, revision=None,
        card=model_card(folder.name, base_model, facts),
    )  # fmt: skip
    return folder


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
