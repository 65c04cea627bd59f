"""A base with packed weights: packed while it is read, one weight at a time, or packed already in its files.

Invariant: beside the packed model there is never more than one weight in floats.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from lorakit.base.lazy import LazyTensors, load_on_meta
from lorakit.base.load import load_base
from lorakit.base.provenance import ORIGIN, StoredTensor
from lorakit.errors import BaseModelError, did_you_mean
from lorakit.files.base_files import open_base_files
from lorakit.lora.layer_kinds import LINEAR, kind_of
from lorakit.lora.targets import embedding_and_head, matches
from lorakit.quant.bnb import SCHEMES, QuantizedWeight, QuantLinear, QuantScheme, floats, quantize
from lorakit.quant.files import QuantizedEntry, dequantized_entries, is_quantized, quantized_entries, stored_tensors

PACKED_ALREADY: Final = "its weights are packed in its files"


@dataclass(frozen=True)
class QuantConfig:
    """How a base is to be packed."""

    packing: QuantScheme
    skip: tuple[str, ...] = ()
    """modules that stay as they are, besides the output head, by name or suffix"""
    only: tuple[str, ...] | None = None
    """just these layers, by whole names"""


@final
class QuantizedTensors:
    """The tensors of a packed base by the names of its model; what is packed is packed when it is asked for."""

    def __init__(
        self, folder: Path, model: nn.Module, packed: Mapping[str, QuantizedWeight], stored: Mapping[str, QuantizedEntry],
        device: torch.device,
    ) -> None:  # fmt: skip
        self._files, self._packed, self._stored, self._device = open_base_files(folder), packed, stored, device
        self._plain = LazyTensors(folder, model)
        self._last: tuple[str, dict[str, Tensor]] = ("", {})

    def read_into(self, name: str, start: int, tensor: Tensor) -> None:
        """Fill a tensor with the elements of a parameter from ``start`` on; errors as ``LazyTensors.read_into``."""
        module, _, key = name.rpartition(".")
        if module not in self._packed or key == "bias":
            self._plain.read_into(name, start, tensor)
            return
        flat = self._of(module)[key].view(-1)
        tensor.detach().view(-1).copy_(flat[start : start + tensor.numel()])

    def floats(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A whole parameter in floats, as the layer computes with it."""
        module, _, key = name.rpartition(".")
        if module in self._packed and key == "weight":
            return floats(QuantLinear(self._packed[module], self._of(module), None))
        return self._plain.read(name, 0, torch.Size(shape).numel()).view(shape)

    def _of(self, module: str) -> dict[str, Tensor]:
        """The packed tensors of a layer; those of the last one are kept, as an engine asks for one after the other."""
        if self._last[0] != module:
            self._last = ("", {})
            self._last = (module, self._read(module))
        return self._last[1]

    def _read(self, module: str) -> dict[str, Tensor]:
        facts = self._packed[module]
        if module in self._stored:
            return stored_tensors(self._files, self._stored[module])
        W = self._plain.read(f"{module}.weight", 0, facts.shape[0] * facts.shape[1]).view(facts.shape)
        return quantize(W.to(self._device), facts.scheme)


def load_quantized(
    folder: Path, dtype: torch.dtype, quantization: QuantConfig | None, device: torch.device
) -> tuple[nn.Module, QuantizedTensors]:
    """The base without its weights, its linear layers packed, and the tensors to fill it with.

    ``device``: where weights are packed. ``quantization``: None for a base whose files are packed.

    Raises:
        BaseModelError: as ``load_on_meta``; or the files are packed in another way than asked, or not as
        bitsandbytes packs.
    """
    files = open_base_files(folder)
    stored = quantized_entries(files, device)
    if stored and quantization is not None and {one.packing for one in stored.values()} != {quantization.packing}:
        found = ", ".join(sorted({_told(one.packing) for one in stored.values()}))
        raise BaseModelError(
            f"{folder}: {PACKED_ALREADY} ({found}), and base.quantize asks for {_told(quantization.packing)}; leave"
            " base.quantize out"
        )
    model = load_on_meta(folder, dtype, dequantized_entries(files, stored) if stored else None)
    if stored:
        packed = _bind_stored(folder, model, stored, dtype)
        held = {module: stored[_origin_name(model, module)] for module in packed}
        for module in packed:
            vars(model.get_parameter(f"{module}.weight")).pop(ORIGIN)
    else:
        assert quantization is not None
        packed, held = layers_to_quantize(folder, model, quantization, dtype), {}
    tensors = QuantizedTensors(folder, model, packed, held, device)
    for module, facts in packed.items():
        replace_with_quantized(model, module, facts)
    return model, tensors


def materialize(model: nn.Module, tensors: QuantizedTensors, device: torch.device) -> nn.Module:
    """The model with all its tensors, on a device."""
    made: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            value = torch.empty(parameter.shape, dtype=parameter.dtype)
            tensors.read_into(name, 0, value)
            made[id(parameter)] = nn.Parameter(value.to(device), requires_grad=False)
    for module in model.modules():
        for key, held in list(module._parameters.items()):
            if held is not None and id(held) in made:
                module._parameters[key] = made[id(held)]
    return model.to(device)


def _origin_name(model: nn.Module, module: str) -> str:
    origin = vars(model.get_parameter(f"{module}.weight")).get(ORIGIN)
    return origin.name if isinstance(origin, StoredTensor) else ""


def _bind_stored(
    folder: Path, model: nn.Module, stored: Mapping[str, QuantizedEntry], dtype: torch.dtype
) -> dict[str, QuantizedWeight]:
    """The layers whose weights are packed in the files."""
    packed = {}
    for module in linear_layers(model):
        if (name := _origin_name(model, module)) in stored:
            packed[module] = QuantizedWeight(stored[name].packing, stored[name].shape, dtype)
    if len(packed) < len(stored):
        raise BaseModelError(
            f"{folder}: {len(stored) - len(packed)} of {len(stored)} packed weights belong to no linear layer of"
            f" {type(model).__name__}, or it rearranges them while loading; use the base it was made from"
        )
    return packed


def layers_to_quantize(
    folder: Path, model: nn.Module, quantization: QuantConfig, dtype: torch.dtype
) -> dict[str, QuantizedWeight]:
    """Every linear layer but the output head and what is to be skipped."""
    layers, modules = linear_layers(model), dict(model.named_modules())
    for pattern in quantization.skip:
        if not any(matches((pattern,), name) for name in modules if name):
            raise BaseModelError(
                f"base.skip_modules: {pattern!r} matches no module of this base."
                + did_you_mean(pattern, (name.rpartition(".")[2] for name in layers))
            )
    _, head = embedding_and_head(model)
    skipped = tuple(name for name in modules if name and matches(quantization.skip, name))

    def chosen(name: str) -> bool:
        if quantization.only is not None:
            return name in quantization.only
        return name != head and not any(name == one or name.startswith(f"{one}.") for one in skipped)

    packed = {
        name: QuantizedWeight(quantization.packing, (layer.out_features, layer.in_features), dtype)
        for name, layer in layers.items()
        if chosen(name)
    }
    if not packed:
        raise BaseModelError(
            f"{folder}: base.quantize: {type(model).__name__} has nothing to pack: only Linear layers are, not Conv1D"
            " and not experts that are stored as 3-D parameters"
        )
    return packed


def load_any_base(folder: Path, dtype: torch.dtype, device: torch.device, quantize: str = "none") -> nn.Module:
    """A whole base: in floats, packed as asked, or as its files are.

    Raises:
        BaseModelError: it cannot be loaded so.
    """
    if quantize not in ("none", *SCHEMES):
        raise BaseModelError(f"quantize: one of none, {', '.join(SCHEMES)}, got {quantize!r}")
    how = None if quantize == "none" else QuantConfig(QuantScheme(quantize, quantize != "int8"))
    if how is None and not is_quantized(folder):
        return load_base(folder, dtype, device)
    return materialize(*load_quantized(folder, dtype, how, device), device)


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Every layer that could be packed, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and kind_of(module) is LINEAR
    }


def replace_with_quantized(model: nn.Module, name: str, facts: QuantizedWeight) -> None:
    old = model.get_submodule(name)
    tensors = {
        key: torch.empty(shape, dtype=dtype, device="meta")
        for key, (shape, dtype) in facts.scheme.shapes(*facts.shape).items()
    }
    new: Any = QuantLinear(facts, tensors, old._parameters["bias"])
    parent, _, key = name.rpartition(".")
    model.get_submodule(parent).register_module(key, new.train(old.training))


def _told(packing: QuantScheme) -> str:
    return packing.name + (" with packed scales" if packing.double_quant else "")
