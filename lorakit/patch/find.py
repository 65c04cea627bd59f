"""Find the folder of a patch: a folder, or a repository of the hub, as ORGANISATION/NAME or ORGANISATION/NAME@REVISION.

A folder comes first. Where the first part of a name is a folder here, the hub is not searched: that is a mistyped path.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lorakit.errors import HubError, MergeError, PatchError, translate_error
from lorakit.files.hub import download, is_repository_name
from lorakit.patch.adapter_config import CONFIG_FILE
from lorakit.patch.patch import SIDECAR, TENSOR_FILE, Patch
from lorakit.patch.pooling import FILES
from lorakit.patch.read import open_patch

PATCH_FILES: Final = (TENSOR_FILE, CONFIG_FILE, SIDECAR, "README.md", *FILES)
"""the files of a patch; all others of a folder or a repository are not"""


def find_patch(name: str | Path) -> Path:
    """Return the folder of a patch; that of the hub is downloaded first. A ``Path`` is a folder always.

    A name that is neither is returned as a path, so that reading it raises the error that says so.
    Raises PatchError if the hub gave none of that name.
    """
    folder = Path(name)
    if isinstance(name, Path) or folder.is_dir():
        return folder
    repository, _, revision = name.partition("@")
    if not is_repository_name(repository) or Path(repository).parent.is_dir():
        return folder
    with translate_error(HubError, PatchError, f"{name}: no folder {folder.absolute()}; on the hub"):
        snapshot = download(repository, revision or None, PATCH_FILES)
    missing = [file for file in (CONFIG_FILE, TENSOR_FILE) if not (snapshot / file).is_file()]
    if missing:
        raise PatchError(f"{name}: this repository of the hub is no patch that lorakit reads: it has no {missing[0]}")
    return snapshot


@dataclass(frozen=True)
class WeightedPatch:
    """One of several patches, and the factor of its update in their sum."""

    index: int  # position among the patches of the call
    patch: Patch
    weight: float

    @property
    def folder(self) -> Path:
        return self.patch.folder


def open_weighted(adapters: Sequence[str | Path | tuple[str | Path, float]]) -> list[WeightedPatch]:
    """Open patch folders given as a path (weight 1) or (path, weight). Raises MergeError unless weights are finite."""
    pairs = [adapter if isinstance(adapter, tuple) else (adapter, 1.0) for adapter in adapters]
    for path, weight in pairs:
        if not isinstance(weight, int | float) or not math.isfinite(weight):
            raise MergeError(f"{path}: the weight must be a finite number, got {weight!r}")
    return [
        WeightedPatch(index, open_patch(find_patch(path)), float(weight)) for index, (path, weight) in enumerate(pairs)
    ]
