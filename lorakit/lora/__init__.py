"""The arithmetic of adapters. Torch only: no recipe, no transformers, no engine."""

from lorakit.lora.inject import adapted_layers, adapter_tensors, attach, inject
from lorakit.lora.layer import LoraLinear
from lorakit.lora.methods import METHODS, Method
from lorakit.lora.targets import AdapterSpec, Target, coverage, find_targets

__all__ = [
    "METHODS", "AdapterSpec", "LoraLinear", "Method", "Target", "adapted_layers", "adapter_tensors", "attach",
    "coverage", "find_targets", "inject",
]  # fmt: skip
