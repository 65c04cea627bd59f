"""Load a base in the form that its user needs. Read this file for the story of loading; each step is a file of its own.

    find_base            name -> folder                                         (find.py)
    load_base            all weights in memory, unquantised                     (transformers_io.py)
    load_on_meta         names and shapes; weights are read later, by ranges    (meta.py, provenance.py, lazy.py)
    load_quantized       load_on_meta with quantised linear layers, if any      (quantized.py)
    materialize          read all weights of a model on meta                    (quantized.py)

Invariant: all these forms have the same names, and the same values up to quantisation.
"""

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from lorakit.base.dropout import disable_dropout
from lorakit.base.quantized import QuantConfig, QuantizedTensors, load_quantized, materialize, quant_config
from lorakit.base.transformers_io import load_base
from lorakit.quant.files import quantization_config
from lorakit.recipe import BaseSection

M_MMAP_THRESHOLD: Final = -3  # the number of the option in glibc's malloc.h
MMAP_THRESHOLD_BYTES: Final = 1 << 18


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
