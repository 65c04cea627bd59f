"""Patch files: PEFT-compatible, checked on reading, durable on writing, tied to their base by a fingerprint."""

from lorakit.patch.fingerprint import BaseIdentity, fingerprint
from lorakit.patch.fit import BaseShapes, check_fits
from lorakit.patch.model import save_patch
from lorakit.patch.patch import Patch, PatchLayer
from lorakit.patch.read import open_patch, read_patch
from lorakit.patch.same_base import check_base, unverified_note
from lorakit.patch.write import new_patch, write_new_patch, write_patch

__all__ = [
    "BaseIdentity", "BaseShapes", "Patch", "PatchLayer", "check_base", "check_fits", "fingerprint", "new_patch",
    "open_patch", "read_patch", "save_patch", "unverified_note", "write_new_patch", "write_patch",
]  # fmt: skip
