"""Quantise a base while it is read, one weight at a time, or read weights that the files hold quantised already.

Invariant: beside the quantised model, at most one weight is in memory dequantised.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from lorakit.base.lazy import SOURCE_ATTRIBUTE, LazyBase, LazyTensors, StoredTensor, source_of, stored_parts
from lorakit.base.meta import load_on_meta
from lorakit.errors import BaseModelError, did_you_mean
from lorakit.files.base_files import BaseFiles, open_base_files
from lorakit.files.safetensors import dtype_name
from lorakit.files.text import count_of
from lorakit.lora.layer_kinds import expert_kind, expert_parameters, kind_of
from lorakit.lora.targets import embedding_and_head, matches
from lorakit.quant.files import QuantizedEntry, quantization_config, quantized_entries, stored_tensors
from lorakit.quant.linear import QuantExperts, QuantizationInfo, QuantLinear, dequantized_weight
from lorakit.quant.published import SCHEMES, PublishedScheme, quant_scheme
from lorakit.quant.schemes import QuantScheme


@dataclass(frozen=True)
class QuantConfig:
    """The scheme and the layers of a base's quantisation."""

    scheme: QuantScheme
    skip: tuple[str, ...] = ()  # modules that stay unquantised, besides the output head: names or their endings
    layers: Mapping[str, QuantScheme] | None = None
    """full name -> scheme of the layers to quantise; None: all linear layers but those of ``skip``"""


def quant_config(name: str, *, double_quant: bool = True, skip: tuple[str, ...] = ()) -> QuantConfig | None:
    """Return the quantisation of a recipe's `base`; None for ``none``. Raises BaseModelError: an unknown name."""
    if name == "none":
        return None
    if name not in SCHEMES:
        raise BaseModelError(f"quantize: one of none, {', '.join(SCHEMES)}, got {name!r}")
    return QuantConfig(quant_scheme(name, double_quant=double_quant), skip)


@dataclass(frozen=True)
class StoredPart:
    """A stored weight that is all of a layer's or of a parameter of experts, or rows of one expert's matrix."""

    entry: QuantizedEntry
    expert: int | None = None  # None: all
    first_row: int = 0


@final
@dataclass
class QuantizedTensors:
    """The ``LazyBase`` of a model that may have quantised layers; a weight is quantised when it is first read."""

    files: BaseFiles
    unquantized: LazyTensors
    layers: Mapping[str, QuantizationInfo]  # name of a layer, or of a parameter of experts -> its quantised weight
    stored: Mapping[str, Sequence[StoredPart]]  # the same name -> its parts, for weights that the files hold quantised
    device: torch.device  # where weights are quantised
    _last: tuple[str, dict[str, Tensor]] = ("", {})

    def fill(self, name: str, start: int, out: Tensor) -> None:
        """Fill a tensor with the elements of a parameter from ``start`` on; errors as ``LazyTensors.fill``."""
        module, _, key = name.rpartition(".")
        if module not in self.layers or key == "bias":
            self.unquantized.fill(name, start, out)
            return
        flat = self.tensors_of(module)[key].view(-1)
        out.detach().view(-1).copy_(flat[start : start + out.numel()])

    def read_weight(self, name: str) -> Tensor:
        """Return a full parameter; a quantised weight is returned dequantised, in its shape (out, in)."""
        module, _, key = name.rpartition(".")
        if module in self.layers and key == "weight":
            return dequantized_weight(QuantLinear(self.layers[module], self.tensors_of(module), None))
        return self.unquantized.read_weight(name)

    def tensors_of(self, module: str) -> dict[str, Tensor]:
        """Return a layer's weight and scales; the last layer's are cached: an engine fills tensor after tensor."""
        if self._last[0] != module:
            self._last = ("", {})  # freed first, so that two layers are never in memory at once
            if module in self.stored:
                tensors = self._joined(self.layers[module], self.stored[module])
            else:
                W = self.unquantized.read_weight(f"{module}.weight").to(self.device)
                tensors = self.layers[module].scheme.quantize(W)
            self._last = (module, tensors)
        return self._last[1]

    def _joined(self, weight: QuantizationInfo, parts: Sequence[StoredPart]) -> dict[str, Tensor]:
        """Read a weight's tensors; those of experts that the files hold one by one are put together."""
        read = (stored_tensors(self.files, part.entry, self.device) for part in parts)
        if parts[0].expert is None:
            return next(read)
        tensors = weight.empty_tensors(self.device)
        assert isinstance(weight.scheme, PublishedScheme)  # as `_expert_part` takes them
        for part, own in zip(parts, read, strict=True):
            for key, value in own.items():
                rows_of_one = 1 if key == "weight" else weight.scheme.rows or 1
                num_rows = math.ceil(part.entry.shape[0] / rows_of_one)
                rows = slice(part.first_row // rows_of_one, part.first_row // rows_of_one + num_rows)
                tensors[key][part.expert, rows] = value  # a scale of the full part is one of each row
        return tensors


def load_quantized(
    folder: Path, dtype: torch.dtype, config: QuantConfig | None, device: torch.device
) -> tuple[nn.Module, QuantizedTensors]:
    """Build the base on meta with quantised linear layers, and return it with the tensors to fill it.

    ``config``: None for a base that stays as its files are, quantised or not. ``device``: where weights are quantised.
    Raises BaseModelError: as ``load_on_meta``; or the files are quantised by another scheme than the recipe's.
    """
    files = open_base_files(folder)
    stored = quantized_entries(files)
    check_scheme(folder, (entry.scheme for entry in stored.values()), config)
    if not stored and config is None and quantization_config(folder) is not None:
        raise BaseModelError(f"{folder}: config.json has quantization_config, but no weight in its files is quantised")
    model = load_on_meta(folder, dtype)
    if config is None or stored:
        parts = _stored_weights(folder, model, stored) if stored else {}
        layers = _weights(model, {name: own[0].entry.scheme for name, own in parts.items()}, dtype)
        for name, weight in layers.items():  # because this source has the dequantised shape and the name of the codes
            vars(model.get_parameter(name if weight.num_experts else f"{name}.weight")).pop(SOURCE_ATTRIBUTE)
    else:
        parts = {}
        layers = layers_to_quantize(folder, model, config, dtype)
    tensors = QuantizedTensors(files, LazyTensors(folder, model), layers, parts, device)
    for module, weight in layers.items():
        replace_with_quantized(model, module, weight)
    return model, tensors


def check_scheme(folder: Path, stored: Iterable[QuantScheme], config: QuantConfig | None) -> None:
    """Raise BaseModelError if a recipe quantises a base whose files hold weights in another scheme."""
    schemes = set(stored)
    if schemes and config is not None and schemes != {config.scheme}:
        own = ", ".join(sorted(map(str, schemes)))
        name = config.scheme.name
        raise BaseModelError(f"{folder}: its files are quantised already ({own}); omit base.quantize: {name}")


def materialize(model: nn.Module, weights: LazyBase, device: torch.device) -> nn.Module:
    """Move a model to a device, and read its parameters on meta."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            filled = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            weights.fill(name, 0, filled.detach())
            torch.utils.swap_tensors(parameter, filled)  # so that a tied one stays one in every module that has it
    return model.to(device)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move a model's buffers, such as the frequencies of rotary positions, to the device that computes."""
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


def _stored_weights(
    folder: Path, model: nn.Module, stored: Mapping[str, QuantizedEntry]
) -> dict[str, list[StoredPart]]:
    """Return the layers and experts that files hold quantised, by name. Raises BaseModelError: other weights are."""
    weights: dict[str, list[StoredPart]] = {}
    for module in linear_layers(model):
        source = source_of(model.get_parameter(f"{module}.weight"))
        if isinstance(source, StoredTensor) and source.name in stored:
            weights[module] = [StoredPart(stored[source.name])]
    for name, (_, (_, *sizes)) in expert_parameters(model):
        source = source_of(model.get_parameter(name))
        assert source is not None
        parts = [_expert_part(part, offset, stored, sizes) for part, offset in stored_parts(source)]
        if known := [part for part in parts if part is not None]:
            weights[name] = known if len(known) == len(parts) else []
    used = {part.entry.name for parts in weights.values() for part in parts}
    sources = map(source_of, model.parameters())
    # without those that the model does not have, such as DeepSeek's layers for further tokens
    needed = {part.name for source in sources if source is not None for part, _ in stored_parts(source)}
    if missed := (needed & {*stored}) - used:
        others = f"{len(missed)} of {len(stored)} quantised weights are of no linear layer"
        remedy = f"write the base in plain floats, and use that: lorakit merge {folder} --out FOLDER"
        raise BaseModelError(f"{folder}: {others} of {type(model).__name__} as it is loaded; {remedy}")
    return weights


def _expert_part(
    stored: StoredTensor, offset: int | None, entries: Mapping[str, QuantizedEntry], sizes: Sequence[int]
) -> StoredPart | None:
    """Return the part of experts of these sizes, (out, in), that a stored tensor has; None: it cannot stay in codes."""
    entry = entries.get(stored.name)
    if entry is None or offset is None:
        return None
    if len(entry.shape) == 3:
        return StoredPart(entry)
    if not isinstance(entry.scheme, PublishedScheme) or entry.scheme.is_ordered:
        return None
    num_rows, width = sizes
    expert, first = divmod(offset // width, num_rows)
    if entry.shape[1] != width or first % (entry.scheme.rows or 1):
        return None
    return StoredPart(entry, expert, first)


def layers_to_quantize(
    folder: Path, model: nn.Module, config: QuantConfig, dtype: torch.dtype
) -> dict[str, QuantizationInfo]:
    """Return the layers to quantise, by name. Raises BaseModelError: none, or a pattern of ``skip`` has no match."""
    layers = linear_layers(model)
    modules = dict(model.named_modules())
    for pattern in config.skip:
        if not any(matches((pattern,), name) for name in modules if name):
            near = did_you_mean(pattern, (name.rpartition(".")[2] for name in layers))
            raise BaseModelError(f"base.skip_modules: {pattern!r} matches no module of this base.{near}")
    schemes = config.layers
    if schemes is None:
        _, head = embedding_and_head(model)
        skipped = tuple(f"{name}." for name in modules if name and (name == head or matches(config.skip, name)))
        schemes = {name: config.scheme for name in layers if not f"{name}.".startswith(skipped)}
    weights = _weights(model, schemes, dtype)
    if not weights:
        raise BaseModelError(f"{folder}: base.quantize: {type(model).__name__} has no Linear layer to quantise")
    return weights


def _weights(model: nn.Module, schemes: Mapping[str, QuantScheme], dtype: torch.dtype) -> dict[str, QuantizationInfo]:
    """Return the quantised weights of layers and of experts, by name. schemes: by name."""
    weights = {
        name: QuantizationInfo(schemes[name], (layer.out_features, layer.in_features), dtype)
        for name, layer in linear_layers(model).items()
        if name in schemes
    }
    for name, (_, (num_experts, *sizes)) in expert_parameters(model):
        if (scheme := schemes.get(name)) is not None:
            if isinstance(scheme, PublishedScheme) and scheme.rows is None:
                scheme = replace(scheme, rows=1)  # experts that are joined have each a scale of its own
            weights[name] = QuantizationInfo(scheme, (sizes[0], sizes[1]), dtype, num_experts)
    return weights


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return every layer that could be quantised, by module name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and kind_of(module) is not None
    }


def replace_with_quantized(model: nn.Module, name: str, weight: QuantizationInfo) -> None:
    """Replace a linear layer, all but its bias, or a parameter of experts, by quantised tensors on meta."""
    tensors = weight.empty_tensors(torch.device("meta"))
    if weight.num_experts:
        module, _, key = name.rpartition(".")
        owner = model.get_submodule(module)
        delattr(owner, key)
        owner.add_module(key, QuantExperts(weight, tensors, transposed=expert_kind(owner).stored_axis == "in"))
        model.set_experts_implementation("eager")  # type: ignore[operator]  # which multiplies by one expert at a time
        return
    old: Any = model.get_submodule(name)
    model.set_submodule(name, QuantLinear(weight, tensors, old.bias).train(old.training))


def quantized_weight(layer: nn.Module) -> QuantizationInfo | None:
    """Return the quantised weight of a layer, with or without an adapter; None if the layer is not quantised."""
    # by attribute, because a LoraLinear copies the attribute from the QuantLinear that it replaces
    weight = getattr(layer, "quantization", None)
    return weight if isinstance(weight, QuantizationInfo) else None


def quantization_facts(model: nn.Module) -> dict[str, Any] | None:
    """Return the record that a patch has of its base's quantisation: scheme, dtype and layers; None if unquantised."""
    weights = {
        name: weight
        for name, layer in model.named_modules()
        if (weight := quantized_weight(layer)) is not None and not weight.num_experts  # which no adapter changes
    }
    if not weights:
        return None
    first = next(iter(weights.values()))  # all layers have one scheme, as load_quantized ensures
    return {
        "name": first.scheme.name, "double": first.scheme.double_quant,
        "dtype": dtype_name(first.dtype), "layers": sorted(weights),
    }  # fmt: skip


def describe_quantization(model: nn.Module) -> str | None:
    """Return the scheme of a model's quantised weights, and their numbers, with or without an adapter; None: floats."""
    weights = [weight for weight in map(quantized_weight, model.modules()) if weight is not None]
    schemes = ", ".join(sorted({str(weight.scheme) for weight in weights}))
    counts = Counter("experts' parameter" if weight.num_experts else "linear layer" for weight in weights)
    numbers = " and ".join(count_of(number, noun) for noun, number in sorted(counts.items(), reverse=True))
    return f"{schemes}, {numbers}" if weights else None


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters of a base without an adapter; a quantised weight counts as its original one."""
    counts: dict[int, int] = {}  # id of a tensor, because a tied one counts once -> parameters that it stores
    for module in model.modules():
        weight = quantized_weight(module)
        for name, tensor in module.named_parameters(recurse=False):
            counts[id(tensor)] = tensor.numel()
            if weight is not None and name in weight.scheme.shapes(*weight.shape):
                # two 4-bit values share a byte, and scales are no parameters of the base
                size = math.prod(weight.shape) * max(1, weight.num_experts)
                counts[id(tensor)] = size if name == "weight" else 0
    return sum(counts.values())
