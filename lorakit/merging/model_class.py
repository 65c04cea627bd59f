"""Choose the model class of a base's folder: the one that config.json names, or the causal language model.

Training and answers need a causal language model. A patch may belong to another class of the same folder, such as a
classifier, and is compared with and merged into that class.
"""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from lorakit.base.transformers_io import load_named_skeleton, load_skeleton
from lorakit.errors import BaseModelError
from lorakit.patch import BaseShapes, Patch
from lorakit.patch.fit import fit_problems


def skeleton_for(folder: Path, patches: Sequence[Patch]) -> nn.Module:
    """Build on meta the model that the patches fit best: the named class, or the causal one, whose names may differ."""
    named = load_named_skeleton(folder)
    if not _num_problems(named, patches):
        return named
    try:
        causal = load_skeleton(folder)
    except BaseModelError:  # transformers has no causal language model of this kind
        return named
    return min(named, causal, key=lambda model: _num_problems(model, patches))  # the named one if equal


def _num_problems(model: nn.Module, patches: Sequence[Patch]) -> int:
    shapes = BaseShapes.of(model)
    return sum(1 for patch in patches for _ in fit_problems(patch, shapes))
