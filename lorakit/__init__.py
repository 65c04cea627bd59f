"""lorakit: LoRA adapters trained, stored as patches, merged and swapped, never silently wrong.

Importing this package imports no torch; each name brings what it needs.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any, Final

from lorakit.errors import LorakitError
from lorakit.version import VERSION as __version__

if TYPE_CHECKING:
    from lorakit.derive.combine import combine
    from lorakit.derive.extract import extract
    from lorakit.formats.convert import convert
    from lorakit.inference.adapted_model import AdaptedModel, load
    from lorakit.inspection.diff import diff
    from lorakit.lora import adapter_tensors, inject
    from lorakit.merging.merge import merge
    from lorakit.patch import Caps, read_patch, save_patch, write_patch
    from lorakit.recipe import load_recipe
    from lorakit.training.start import train

_HOMES: Final = {
    "AdaptedModel": "lorakit.inference.adapted_model", "Caps": "lorakit.patch", "adapter_tensors": "lorakit.lora",
    "combine": "lorakit.derive.combine",
    "convert": "lorakit.formats.convert",
    "diff": "lorakit.inspection.diff", "extract": "lorakit.derive.extract", "inject": "lorakit.lora",
    "load": "lorakit.inference.adapted_model", "load_recipe": "lorakit.recipe", 
    "merge": "lorakit.merging.merge",
    "read_patch": "lorakit.patch", "save_patch": "lorakit.patch", "train": "lorakit.training.start",
    "write_patch": "lorakit.patch",
}  # fmt: skip

__all__ = [
    "AdaptedModel", "Caps", "LorakitError", "__version__", "adapter_tensors", "combine", "convert", "diff", "extract",
    "inject", "load", "load_recipe", "merge", "read_patch", "save_patch", "train", "write_patch",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lorakit' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


class _Package(types.ModuleType):
    """Keeps ``lorakit.merge`` the function: the import system would hang the file of that name over it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
