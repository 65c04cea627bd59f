"""Load a base in the form that its user needs. Read this file for the story of loading; each step is a file of its own.

    find_base            name -> folder                                         (find.py)
    load_base            all weights in memory, unquantised                     (transformers_io.py)
    load_on_meta         names and shapes; weights are read later, by ranges    (meta.py, lazy.py)
    load_quantized       load_on_meta with quantised linear layers, if any      (quantized.py)
    materialize          read all weights of a model on meta                    (quantized.py)
    disable_dropout      `adapter.dropout` is the only dropout of a run         (here)

Invariant: all these forms have the same names, and the same values up to quantisation.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn

from lorakit.base.quantized import QuantConfig, QuantizedTensors, load_quantized, materialize, quant_config
from lorakit.base.transformers_io import load_base
from lorakit.files.base_files import open_base_files
from lorakit.quant.files import quantization_config, quantized_entries
from lorakit.recipe import BaseSection

M_MMAP_THRESHOLD: Final = -3  # the number of the option in glibc's malloc.h
MMAP_THRESHOLD_BYTES: Final = 1 << 18
DROP: Final = "drop"  # part of the names of dropout's settings in transformers' configs and modules
JITTER: Final = "jitter"  # and of the noise of routers
OTHER_HEADS: Final = ("classifier", "summary")
"""beginnings of the names of settings that a causal language model does not read"""


@dataclass(frozen=True)
class LoadedBase:
    """A base's model, and for a model on meta also the weights to fill it with."""

    model: nn.Module
    weights: QuantizedTensors | None = None  # None: the model has its weights
    dropout: dict[str, float] = field(default_factory=dict)  # rates of the base's own dropout that were switched off

    @property
    def read_weight(self) -> Callable[[str], Tensor] | None:
        """``weights.read_weight``, for adapters that start from base values; None if the model has its weights."""
        return self.weights.read_weight if self.weights else None


def load_for_training(
    section: BaseSection, folder: Path, dtype: torch.dtype, device: torch.device, *, sharded: bool
) -> LoadedBase:
    """Load a recipe's base, its dropout off. ``sharded``: without its weights. Raises BaseModelError."""
    config = quant_config(section.quantize, double_quant=section.double_quantize, skip=section.skip_modules)
    if config is not None or quantization_config(folder) is not None:
        return_freed_memory(device)  # because every product of a quantised layer allocates and frees a full weight
    if sharded:
        model, weights = load_quantized(folder, dtype, config, device)
        return LoadedBase(model, weights, disable_dropout(model))
    model = load_full(folder, dtype, device, config)
    return LoadedBase(model, None, disable_dropout(model))


def load_full(folder: Path, dtype: torch.dtype, device: torch.device, config: QuantConfig | None) -> nn.Module:
    """Load a base with all its weights; ``config``: None for weights as they are in the files."""
    if config is None and quantization_config(folder) is None:
        quantized_entries(open_base_files(folder))  # for its error: codes whose scales are not read
        return load_base(folder, dtype, device)
    model, weights = load_quantized(folder, dtype, config, device)
    return materialize(model, weights, device)


def return_freed_memory(device: torch.device) -> None:
    """On a CPU: return freed tensors of 256 KiB and more to the system at once.

    A sharded base's layers are gathered and freed all the time. glibc would reuse the memory in pieces that the next
    layer does not fit (1,649 MB instead of 939 for half a base of 498 MB). Otherwise, returning activations costs a
    fifth of a step.
    """
    if device.type == "cpu" and sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if mallopt is not None:
            mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)


def disable_dropout(model: nn.Module) -> dict[str, float]:
    """Set all dropout of a model and its config to 0, before an adapter. Returns name -> highest rate.

    A base's own dropout (GPT-2's is 0.1) belongs to its pretraining, and its masks would depend on how rows are packed
    and cut into micro-batches. So would noise on the choice of experts.
    """
    rates: dict[str, float] = {}
    # the config too, because some layers read it in forward
    for owner in [*_configs(model.config), *map(vars, model.modules())]:
        for name, value in owner.items():
            is_rate = isinstance(value, float) and 0 < value <= 1 and (DROP in name or JITTER in name)
            if is_rate and not name.startswith(OTHER_HEADS):
                rates[name] = max(value, rates.get(name, 0.0))
                owner[name] = 0.0 if DROP in name else value
    hard_coded: dict[str, float] = {}
    for module in model.modules():
        if any(JITTER in name for name in vars(module)):  # not 0, because PhiMoE reads its jitter in evaluation too
            module.training = False
            module.__dict__["train"] = MethodType(_train_the_layers_in, module)
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            hard_coded["Dropout"] = max(module.p, hard_coded.get("Dropout", 0.0))
            module.p = 0.0
    return rates or hard_coded


def _train_the_layers_in(module: nn.Module, mode: bool = True) -> nn.Module:
    """Set the mode of the layers in a module, which stays in evaluation mode itself: its method ``train``."""
    nn.Module.train(module, mode)
    module.training = False
    return module


def dropout_notes(rates: Mapping[str, float]) -> tuple[str, ...]:
    """Return what to tell the user about the result of ``disable_dropout``: at most one sentence."""
    if not rates:
        return ()
    listed = ", ".join(f"{name} {rate:g}" for name, rate in rates.items())
    return (f"the base's own dropout is off while it trains ({listed}); adapter.dropout is the only one",)


def _configs(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the attributes of a config, and those of the configs and dicts in it."""
    attributes = config if isinstance(config, dict) else vars(config)
    yield attributes
    for value in attributes.values():
        if isinstance(value, dict) or hasattr(value, "to_dict"):
            yield from _configs(value)
