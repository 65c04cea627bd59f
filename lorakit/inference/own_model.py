"""Put a patch on a torch model that the caller holds, take an adapter off it, or merge the adapter into it.

Invariant: a call that raises an error leaves the model as it was. Only `merge_into` changes weights of the base, and it
replaces parameters: no tensor of the base is written.
"""

from collections.abc import Collection
from pathlib import Path

import torch
from torch import nn

from lorakit.errors import PatchError, TargetError
from lorakit.inference.bind import base_values, merged_tensors, replace_tensor
from lorakit.lora import AdapterSpec, adapter_modules, attach
from lorakit.lora.inject import adapting, checkpoint_tensors, replace_modules, restore_layers
from lorakit.lora.wrappers import check_unwrapped
from lorakit.patch import BaseShapes, check_fits, read_patch
from lorakit.patch.fit import with_head_names, without_copies
from lorakit.patch.model import fill_adapter, patch_from_model, patch_settings
from lorakit.patch.same_base import Allow, check_live_base


def load_patch(
    model: nn.Module, folder: str | Path, *, dropout: float = 0.0, allow: Collection[Allow] = ()
) -> nn.Module:
    """Put a patch on any torch model, in place: the base is frozen, and the adapter goes on learning if you train it.

    The inverse of ``save_patch``. Returns the same model. dropout: of the adapter, in training. allow: ``base`` accepts
    a model with other weights than the patch was trained on, or in another dtype than the base's files have.
    Raises PatchError: no patch, or one that does not fit. TargetError: no torch model, or one with an adapter.
    """
    with adapting(model, "load_patch"):
        patch = read_patch(folder)
        shapes = BaseShapes.of(model)
        patch = with_head_names(patch, shapes, model)
        check_fits(patch, shapes, type(model).__name__)
        if "base" not in allow:
            check_live_base(patch, model)
        spec = AdapterSpec(**{**patch_settings(patch), "new_tokens": patch.new_tokens, "dropout": dropout})
        attach(model, spec, seed=0)
        fill_adapter(model, without_copies(patch, base_values(model), checkpoint_tensors(model)))
    return model


def remove(model: nn.Module) -> nn.Module:
    """Take the adapter off a model from ``inject`` or ``load_patch``, in place: every layer is the base's own.

    The base stays frozen. Returns the same model.
    Raises TargetError: no adapter, or one that trained tensors of the base in full, whose own values are gone.
    """
    _check_adapted(model, "remove")
    full = [f"{name}.{key}" for name, module in adapter_modules(model) for key in module.full_tensors()]
    if full:
        raise TargetError(f"remove: the adapter trained {full[0]} in full; reload the base, or call lorakit.merge_into")
    restore_layers(model)
    return model


def merge_into(model: nn.Module) -> nn.Module:
    """Merge the adapter of a model from ``inject`` or ``load_patch`` into its weights, in place.

    Each changed weight is the float64 sum W + s B A rounded once to its dtype, as `lorakit merge` writes it. The layers
    are the base's own, and the adapter is gone. Returns the same model.
    Raises TargetError: no adapter, a quantised base, or a value does not fit. PatchError: a value is not finite.
    """
    _check_adapted(model, "merge_into")
    values = {name: tensor.detach().to("cpu", torch.float32) for name, tensor in checkpoint_tensors(model).items()}
    patch = patch_from_model(model, values, metadata={}, base_model=None)
    restored = restore_layers(model)
    try:
        merged = merged_tensors(patch, model, BaseShapes.of(model))
    except PatchError as problem:
        replace_modules(model, dict(restored))
        raise TargetError(f"merge_into: {problem}") from None
    for name, tensor in merged.items():
        replace_tensor(model, name, tensor)
    return model


def _check_adapted(model: nn.Module, call: str) -> None:
    check_unwrapped(model, call)
    if not any(adapter_modules(model)):
        raise TargetError(f"{call}: a model from lorakit.inject or load_patch expected, and this one has no adapter")
