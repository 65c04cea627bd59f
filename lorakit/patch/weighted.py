"""Open patches with weights, for a sum of patches: ``merge`` and ``combine``."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lorakit.errors import MergeError
from lorakit.patch.find import find_patch
from lorakit.patch.patch import Patch
from lorakit.patch.read import open_patch


@dataclass(frozen=True)
class WeightedPatch:
    """One of several patches, and the factor of its update in their sum."""

    index: int
    """position among the patches of the call"""
    patch: Patch
    weight: float

    @property
    def folder(self) -> Path:
        return self.patch.folder


def open_weighted(adapters: Sequence[str | Path | tuple[str | Path, float]]) -> list[WeightedPatch]:
    """Open patch folders given as a path (weight 1) or as (path, weight).

    Raises:
        MergeError: a weight is not a finite number. PatchError: a patch is damaged.
    """
    pairs = [adapter if isinstance(adapter, tuple) else (adapter, 1.0) for adapter in adapters]
    for path, weight in pairs:
        if not isinstance(weight, int | float) or not math.isfinite(weight):
            raise MergeError(f"{path}: the weight must be a finite number, got {weight!r}")
    return [
        WeightedPatch(index, open_patch(find_patch(path)), float(weight)) for index, (path, weight) in enumerate(pairs)
    ]
