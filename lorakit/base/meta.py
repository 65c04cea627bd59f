"""What a load by ranges asks of transformers, beside model.py, the other file that imports it."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from lorakit.base.load import _explained, _quiet, load_skeleton
from lorakit.errors import BaseModelError

ELSEWHERE: Final = "use backend single, ddp or zero2 and a base in floats, which load whole tensors"
UNREADABLE: Final = ("quantization_config", "transformers_weights")


def build_from_placeholders(
    folder: Path, dtype: torch.dtype, stored: Mapping[str, Any], *, packed: bool = False
) -> tuple[nn.Module, dict[str, Any]]:
    """The causal language model of a folder as transformers builds it from stand-ins for the stored tensors.

    transformers asks two things of a stand-in: ``replacement[...]`` and ``.to(device=..., dtype=...)``. Beside the model
    its report: the keys ``missing_keys`` (names) and ``mismatched_keys`` (name, stored shape, shape in the model).
    ``packed``: the files are, and the stand-ins are not.

    Raises:
        BaseModelError: an unknown architecture, or one whose tensors are not only rearranged while they are loaded.
    """
    with _quiet(), _without_zero3():
        skeleton = load_skeleton(folder)
        config: Any = skeleton.config
        if packed:
            del config.quantization_config
        for key in UNREADABLE:
            if getattr(config, key, None) is not None:
                raise BaseModelError(f"{folder}: config.json has {key}, which cannot be loaded in parts; {ELSEWHERE}")
        with _explained_in_parts(folder):
            model, report = type(skeleton).from_pretrained(  # type: ignore[attr-defined]
                None, config=config, state_dict=dict(stored), dtype=dtype, ignore_mismatched_sizes=True,
                output_loading_info=True, local_files_only=True,
            )  # fmt: skip
        with _explained(folder):
            _name(model, folder)
    return model, report


def tied_names(model: nn.Module) -> dict[str, str]:
    """Parameters that the config ties: target -> source. A mutable part of the model, not a copy."""
    names: dict[str, str] = model.all_tied_weights_keys  # type: ignore[assignment]
    return names


def _name(model: Any, folder: Path) -> None:
    """What transformers sets when it is given a folder: where the model is from, and its generation settings."""
    model.name_or_path = model.config.name_or_path = str(folder)
    if model.can_generate():
        model.adjust_generation_fn(
            None, True, None, folder, cache_dir=None, force_download=False, proxies=None, local_files_only=True,
            token=None, revision=None, subfolder="", trust_remote_code=False,
        )  # fmt: skip


@contextlib.contextmanager
def _without_zero3() -> Iterator[None]:
    """Without DeepSpeed's partitioning inside transformers, which a live DeepSpeed plugin of accelerate switches on."""
    from transformers.integrations import deepspeed

    alive = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = alive


@contextlib.contextmanager
def _explained_in_parts(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as problem:  # transformers' own code on a user's files: it fails in many ways
        raise BaseModelError(
            f"{folder}: transformers cannot load it in parts: {type(problem).__name__}: {problem}; {ELSEWHERE}"
        ) from None
