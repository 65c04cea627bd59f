"""The arithmetic of adapters. Torch only: no recipe, no transformers, no engine."""

from lorakit.lora.inject import adapter_modules, adapter_tensors, attach, inject
from lorakit.lora.linear import LoraLinear
from lorakit.lora.spec import AdapterSpec
from lorakit.lora.targets import find_targets

__all__ = ["AdapterSpec", "LoraLinear", "adapter_modules", "adapter_tensors", "attach", "find_targets", "inject"]
