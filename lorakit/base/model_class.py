"""Choose the model class of a base's folder: the one that config.json names, or the causal language model.

Training and answers need a causal language model. A patch may belong to another class of the same folder, such as a
classifier, and is compared with and merged into that class.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from lorakit.base.load import explain_load_errors, load_skeleton, named_classes, quiet_loading
from lorakit.errors import BaseModelError
from lorakit.patch import BaseShapes, Patch
from lorakit.patch.fit import fit_problems


def load_named_skeleton(folder: Path) -> nn.Module:
    """Build the model that config.json names in ``architectures`` on the meta device, as ``load_skeleton`` does.

    A causal language model if the config names no class of transformers.
    """
    with quiet_loading():
        import transformers
    for name in named_classes(folder):
        named = getattr(transformers, name, None)
        if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
            with quiet_loading(), explain_load_errors(folder), torch.device("meta"):
                config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
                skeleton: nn.Module = named(config)
                return skeleton
    return load_skeleton(folder)


def skeleton_for(folder: Path, patches: Sequence[Patch]) -> nn.Module:
    """Build the model of a folder that the patches fit best on the meta device: the named class, or the causal one.

    The causal one too, because a base of text and images may name a class whose layers have other names than those of
    the language model that was trained.
    """
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
