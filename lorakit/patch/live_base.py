"""Fingerprint the adapted weights of a model in memory, and compare them with those that a patch was trained on."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lorakit.files.dtypes import dtype_name, parse_dtype
from lorakit.lora.layer_kinds import is_linear_like
from lorakit.patch.allow import RefusedBaseError
from lorakit.patch.fingerprint import FULL_SCHEME, SCHEME
from lorakit.patch.patch import Patch
from lorakit.patch.weight_digest import Source, sample_digest, value_digests


def fingerprint_live(model: nn.Module, names: Iterable[str]) -> dict[str, Any]:
    """Return the fingerprint of a base in memory: digests of its weights in the dtype they were loaded in.

    ``names``: the adapted layers and parameters of experts; if there are none, all linear layers are compared.
    """
    modules = list(names) or [name for name, module in model.named_modules() if is_linear_like(module)]
    weights = {name: _weight(model, name) for name in modules}
    dtypes = {weight.dtype for weight in weights.values()}
    sources = {name: _source(weight) for name, weight in weights.items()}
    return {
        "scheme": SCHEME,
        "config": None,
        "tokenizer": None,
        "rounded_to": dtype_name(dtypes.pop()) if len(dtypes) == 1 else None,
        "weights": {name: sample_digest(*source) for name, source in sources.items()},
        "full": {
            "scheme": FULL_SCHEME,
            "weights": dict(zip(sources, value_digests(list(sources.values())), strict=True)),
        },
    }


def check_live_base(patch: Patch, model: nn.Module) -> None:
    """Raise an error unless the weights of a model in memory are those that the patch was trained on.

    Only adapted weights are compared, by samples. A patch without a fingerprint passes.

    Raises:
        PatchError: other weights, also if they differ by the rounding of another dtype, or are quantised.
    """
    recorded = patch.metadata.get("base")
    if recorded is None:
        return
    dtype = parse_dtype(recorded.get("rounded_to"))
    expected = recorded["weights"]
    names = list(dict.fromkeys([*patch.layers, *expected]))
    differing = []
    for name in names:
        weight = _weight(model, name)
        if expected.get(name) != sample_digest(*_source(weight, dtype or weight.dtype)):
            differing.append(name)
    if differing:
        raise RefusedBaseError(
            f"{patch.folder}: was trained on another base than this model: {len(differing)} of {len(names)} adapted"
            f" weights differ ({differing[0]} first); a base that is quantised, or rounded to another dtype than in"
            " training, counts as another",
            "base",
        )


def _weight(model: nn.Module, name: str) -> Tensor:
    """Return the weight of a layer, or a parameter of experts, by name."""
    parent, _, key = name.rpartition(".")
    parameter = model.get_submodule(parent)._parameters.get(key)
    weight = model.get_submodule(name).weight if parameter is None else parameter
    assert isinstance(weight, Tensor)
    return weight


def _source(weight: Tensor, dtype: torch.dtype | None = None) -> Source:
    flat = weight.detach().reshape(-1)
    return tuple(weight.shape), lambda start, stop: flat[start:stop].cpu().to(dtype or flat.dtype)
