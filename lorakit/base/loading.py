"""A base as a run needs it: whole or in parts, its weights in floats or packed."""

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from lorakit.base.lazy import LazyTensors, load_on_meta
from lorakit.base.load import load_base
from lorakit.base.quantized import QuantConfig, load_quantized, materialize
from lorakit.lora.inject import StoredWeight
from lorakit.quant.bnb import QuantScheme
from lorakit.quant.files import is_quantized
from lorakit.recipe import BaseSection

M_MMAP_THRESHOLD: Final = -3  # malloc.h
GIVEN_BACK_BYTES: Final = 1 << 18


@dataclass(frozen=True)
class LoadedBase:
    """A model, and where the values come from that are not in it yet."""

    model: nn.Module
    read: Callable[[str, int, Tensor], None] | None = None
    """fills a part of a parameter, for an engine that holds the base in parts"""
    stored: StoredWeight | None = None
    """gives a whole parameter in floats, of a model without weights"""


def load_for_training(
    section: BaseSection, folder: Path, dtype: torch.dtype, device: torch.device, *, sharded: bool
) -> LoadedBase:
    """The base of a recipe's section; ``sharded``: without its weights.

    Raises:
        BaseModelError: it cannot be loaded, or not packed as asked.
    """
    packed = section.quantize != "none" or is_quantized(folder)
    if not packed and not sharded:
        return LoadedBase(load_base(folder, dtype, device))
    if packed:
        return_freed_memory(device)  # whole weights come and go, now and with every product
        model, tensors = load_quantized(folder, dtype, quantization(section), device)
        if not sharded:
            return LoadedBase(materialize(model, tensors, device))
        shapes = _shapes(model)
        return LoadedBase(model, tensors.read_into, lambda name: tensors.floats(name, shapes[name]))
    model = load_on_meta(folder, dtype)
    plain, shapes = LazyTensors(folder, model), _shapes(model)
    return LoadedBase(
        model, plain.read_into, lambda name: plain.read(name, 0, torch.Size(shapes[name]).numel()).view(shapes[name])
    )


def quantization(section: BaseSection) -> QuantConfig | None:
    """How a recipe packs its base; None when it does not."""
    if section.quantize == "none":
        return None
    double = section.double_quantize and section.quantize != "int8"
    return QuantConfig(QuantScheme(section.quantize, double), section.skip_modules)


def quantization_facts(model: nn.Module) -> dict[str, Any] | None:
    """What a patch tells of a packed base: how, and which layers are not; None for a base in floats."""
    found = {name: module.packed for name, module in model.named_modules() if hasattr(module, "packed")}
    if not found:
        return None
    first = next(iter(found.values()))
    return {
        "name": first.scheme.name, "double": first.scheme.double_quant,
        "dtype": str(first.dtype).removeprefix("torch."), "layers": sorted(found),
    }  # fmt: skip


def count_parameters(model: nn.Module) -> int:
    """Parameters of a base without an adapter, a packed weight by the values it stands for."""
    counted: dict[int, int] = {}
    for module in model.modules():
        packed = getattr(module, "packed", None)
        for name, tensor in module._parameters.items():
            if tensor is None:
                continue
            counted[id(tensor)] = tensor.numel()
            if packed is not None and name in packed.scheme.shapes(*packed.shape):
                counted[id(tensor)] = packed.shape[0] * packed.shape[1] if name == "weight" else 0
    return sum(counted.values())


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}


def return_freed_memory(device: torch.device) -> None:
    """On a CPU: freed tensors of a quarter megabyte and more go back to the system at once.

    Layers are gathered and freed all the time where the base is in parts; glibc would keep what is freed, in pieces
    that the next layer does not fit (measured: 1,649 MB instead of 939 for half a base of 498 MB). A whole base is left
    to glibc: nothing large comes and goes but activations, and giving these back costs a fifth of a step.
    """
    if device.type == "cpu" and sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if mallopt is not None:
            mallopt(M_MMAP_THRESHOLD, GIVEN_BACK_BYTES)
