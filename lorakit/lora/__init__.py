"""The arithmetic of adapters. Torch only: no recipe, no transformers, no engine."""

from lorakit.lora.inject import (
    adapted_names,
    adapter_modules,
    adapter_tensors,
    attach,
    fixed_tensors,
    inject,
)
from lorakit.lora.linear import LoraLinear
from lorakit.lora.methods import METHODS, Method
from lorakit.lora.spec import AdapterSpec
from lorakit.lora.targets import Target, find_targets

__all__ = [
    "METHODS",
    "AdapterSpec",
    "LoraLinear",
    "Method",
    "Target",
    "adapted_names",
    "adapter_modules",
    "adapter_tensors",
    "attach",
    "find_targets",
    "fixed_tensors",
    "inject",
]
