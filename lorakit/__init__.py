"""lorakit: LoRA adapters trained, stored as patches, merged and swapped, never silently wrong.

Importing this package imports no torch: each public name is imported from its module when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from lorakit.errors import LorakitError, check_platform
from lorakit.version import VERSION as __version__

if TYPE_CHECKING:
    from lorakit.derive.combine import combine
    from lorakit.derive.extract import extract
    from lorakit.formats.convert import convert
    from lorakit.inference.adapted_model import AdaptedModel
    from lorakit.inference.bind import load_patch, merge_into, remove
    from lorakit.inference.load import load
    from lorakit.inspection.diff import diff
    from lorakit.lora import adapter_tensors, inject
    from lorakit.merging.merge import merge
    from lorakit.objectives.objective import Objective
    from lorakit.ops.fuse import fuse_model
    from lorakit.patch import read_patch, save_patch, write_patch
    from lorakit.recipe import load_recipe
    from lorakit.run.facts import TrainResult
    from lorakit.training.callbacks import Callback, StopTraining
    from lorakit.training.start import train

_MODULES: Final = {
    "AdaptedModel": "lorakit.inference.adapted_model",
    "Callback": "lorakit.training.callbacks",
    "Objective": "lorakit.objectives.objective",
    "StopTraining": "lorakit.training.callbacks",
    "TrainResult": "lorakit.run.facts",
    "adapter_tensors": "lorakit.lora",
    "combine": "lorakit.derive.combine",
    "convert": "lorakit.formats.convert",
    "diff": "lorakit.inspection.diff",
    "extract": "lorakit.derive.extract",
    "fuse_model": "lorakit.ops.fuse",
    "inject": "lorakit.lora",
    "load": "lorakit.inference.load",
    "load_patch": "lorakit.inference.bind",
    "load_recipe": "lorakit.recipe",
    "merge": "lorakit.merging.merge",
    "merge_into": "lorakit.inference.bind",
    "read_patch": "lorakit.patch",
    "remove": "lorakit.inference.bind",
    "save_patch": "lorakit.patch",
    "train": "lorakit.training.start",
    "write_patch": "lorakit.patch",
}

_ANYWHERE: Final = {"adapter_tensors", "fuse_model", "inject", "load_recipe"}
"""names that need nothing that Windows lacks"""

__all__ = [
    "AdaptedModel", "Callback", "LorakitError", "Objective", "StopTraining", "TrainResult", "__version__",
    "adapter_tensors", "combine", "convert", "diff", "extract", "fuse_model", "inject", "load", "load_patch",
    "load_recipe", "merge", "merge_into", "read_patch", "remove", "save_patch", "train", "write_patch",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'lorakit' has no attribute {name!r}")
    if name not in _ANYWHERE:
        check_platform()
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
