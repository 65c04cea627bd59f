"""Turn the adapter of a model into a patch, with the tensors and settings that PEFT's files can express."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lorakit.errors import PatchError
from lorakit.lora.experts import LoraExperts
from lorakit.lora.inject import adapted_layers, adapted_names, adapter_modules, adapter_tensors, fixed_tensors
from lorakit.lora.layer_kinds import LayerKind, fan_in_fan_out
from lorakit.lora.linear import LoraLinear
from lorakit.lora.methods import METHODS, PLAIN, saved_as
from lorakit.lora.modules_to_save import TokenHead, TrainableModule, TrainableTokens
from lorakit.patch.live_base import fingerprint_live
from lorakit.patch.patch import Patch, PatchLayer, TokenRows
from lorakit.patch.write import new_patch, write_patch
from lorakit.version import VERSION


def save_patch(model: nn.Module, folder: str | Path, *, base_model: str | None = None, overwrite: bool = False) -> Path:
    """Write the adapter of a model from your own training loop as a patch folder; return the folder.

    ``base_model``: the name that others load the base by; None takes the name from the model's config.

    Raises:
        PatchError: no adapter, a tensor that is not finite, or a patch is there already and ``overwrite`` is off.
    """
    if not isinstance(model, nn.Module):
        raise PatchError(
            f"save_patch writes the adapter of a model from lorakit.inject, got a {type(model).__name__}; a patch that"
            " was loaded is a file already: copy its folder, or write_patch(folder, read_patch(path))"
        )
    adapter = adapter_tensors(model) | fixed_tensors(model)
    tensors = {name: tensor.detach().to("cpu", torch.float32) for name, tensor in adapter.items()}
    base_model = base_model or getattr(getattr(model, "config", None), "_name_or_path", None) or None
    metadata = {
        "lorakit": VERSION,
        "base": fingerprint_live(model, adapted_names(model)),
        "adapter": {"layers": len(adapted_names(model)), **_settings(model)},
    }
    patch = patch_from_model(model, tensors, metadata=metadata, base_model=base_model)
    return write_patch(folder, patch, overwrite=overwrite)


def _settings(model: nn.Module) -> dict[str, str]:
    """Return method, rank and alpha, each with several values if layers differ."""
    layers = [layer for _, layer in adapted_layers(model)]
    return {
        key: ", ".join(sorted({f"{value:g}" if isinstance(value, float) else str(value) for value in values}))
        for key, values in (
            ("method", [layer.method for layer in layers]), ("rank", [layer.rank for layer in layers]),
            ("alpha", [layer.alpha for layer in layers]),
        )
    }  # fmt: skip


@dataclass
class _Parts:
    """The parts of a patch, collected from the adapter's modules one by one."""

    layers: dict[str, PatchLayer] = field(default_factory=dict)
    full_tensors: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, TokenRows] = field(default_factory=dict)


def patch_from_model(
    model: nn.Module, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, Any], base_model: str | None,
    revision: str | None = None,
) -> Patch:  # fmt: skip
    """Return the adapter of ``model`` as a patch.

    ``tensors``: all tensors of the adapter by name, fixed ones included, unsharded and in float32. An adapter that
    started as a part of W (pissa, olora) becomes a plain update of twice the rank on W itself.

    Raises:
        PatchError: the model has no adapter, or a tensor is missing, mis-shaped or not finite.
    """
    parts = _Parts()
    dropout = 0.0
    kinds: list[LayerKind] = []
    for name, carrier in adapter_modules(model):
        if isinstance(carrier, LoraLinear):
            parts.layers[name] = _linear(name, carrier, tensors)
            dropout = carrier.dropout
            kinds.append(carrier.kind)
        elif isinstance(carrier, LoraExperts):
            parts.layers |= _experts(name, carrier, tensors)
        elif isinstance(carrier, TrainableTokens | TokenHead) and carrier.adapter_tensors():  # no tied head
            rows = _checked(tensors, f"{name}.trainable_tokens_delta", (len(carrier.tokens), carrier.embedding_dim))
            parts.rows[name] = TokenRows(carrier.tokens, rows)
        if isinstance(carrier, TrainableTokens) and carrier.new_tokens:
            metadata = {**metadata, "new_tokens": carrier.new_tokens}
        if isinstance(carrier, TrainableModule | LoraLinear):
            parts.full_tensors |= {
                f"{name}.{key}": _checked(tensors, f"{name}.{key}", None) for key in carrier.full_tensors()
            }
    if not (parts.layers or parts.full_tensors or parts.rows):
        raise PatchError("the model has no adapter: call lorakit.inject first")
    return new_patch(
        parts.layers, full_tensors=parts.full_tensors, rows=parts.rows,
        metadata=metadata, base_model=base_model, revision=revision, dropout=dropout,
        all_modules=[name for name, _ in model.named_modules()],
        task_type="CAUSAL_LM" if type(model).__name__.endswith("ForCausalLM") else None,
        fan_in_fan_out=fan_in_fan_out(kinds),
    )  # fmt: skip


def _linear(name: str, layer: LoraLinear, tensors: Mapping[str, Tensor]) -> PatchLayer:
    sizes = (layer.out_features, layer.in_features)
    rank = layer.rank
    shapes = METHODS[layer.method].stored_shapes(sizes, rank)
    parts = {part: _checked(tensors, f"{name}.{part}", shape) for part, shape in shapes.items()}
    embedding = layer.kind.takes_ids
    if "lora_A0" not in layer.fixed_tensors():
        return PatchLayer(saved_as(layer.method), rank, layer.alpha, sizes, parts, embedding)
    # the layer computes W + s (B A - B0 A0) x, which is one update with both pairs of factors side by side
    A0, B0 = (_checked(tensors, f"{name}.{part}0", shape) for part, shape in shapes.items())
    both = {"lora_A": torch.cat([parts["lora_A"], A0]), "lora_B": torch.cat([parts["lora_B"], -B0], dim=1)}
    return PatchLayer(PLAIN, 2 * rank, layer.scale * 2 * rank, sizes, both, embedding)


def _experts(name: str, layer: LoraExperts, tensors: Mapping[str, Tensor]) -> dict[str, PatchLayer]:
    layers = {}
    for parameter, update in layer.adapted.items():
        sizes = (update.out_features, update.in_features)
        shapes = METHODS[update.method].stored_shapes(sizes, update.rank * update.num_experts)
        parts = {part: _checked(tensors, f"{name}.{parameter}.{part}", shape) for part, shape in shapes.items()}
        layers[f"{name}.{parameter}"] = PatchLayer(
            saved_as(update.method), update.rank, update.alpha, sizes, parts, num_experts=update.num_experts
        )
    return layers


def _checked(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...] | None) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None or (shape is not None and tuple(tensor.shape) != shape):
        got = "nothing" if tensor is None else tuple(tensor.shape)
        raise PatchError(f"{name}: {shape or 'a tensor'} was trained, {got} arrived to be saved")
    return tensor
