"""Patch files: PEFT-compatible, checked on reading, durable on writing, tied to their base by a fingerprint."""

from lorakit.patch.base_files import BaseFiles, open_base_files
from lorakit.patch.fingerprint import check_base, fingerprint
from lorakit.patch.patch import Patch, PatchLayer, check_fits, read_patch, remove_patch, write_patch
from lorakit.patch.save import save_patch

__all__ = [
    "BaseFiles", "Patch", "PatchLayer", "check_base", "check_fits", "fingerprint", "open_base_files",
    "read_patch", "remove_patch", "save_patch", "write_patch",
]  # fmt: skip
