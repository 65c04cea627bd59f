"""Fingerprint the adapted weights of a model in memory, and compare them with those that a patch was trained on."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn

from lorakit.files.dtypes import dtype_name, parse_dtype
from lorakit.patch.allow import RefusedBaseError
from lorakit.patch.fingerprint import FULL_SCHEME, SCHEME
from lorakit.patch.patch import Patch
from lorakit.patch.weight_digest import sample_digest, value_digests


def fingerprint_live(model: nn.Module, modules: Iterable[str]) -> dict[str, Any]:
    """Return the fingerprint of a base in memory: digests of its weights in the dtype they were loaded in."""
    sources, dtypes = {}, set()
    for module in modules:
        weight = model.get_submodule(module).weight
        assert isinstance(weight, Tensor)
        flat = weight.detach().reshape(-1)
        sources[module] = (tuple(weight.shape), lambda start, stop, flat=flat: flat[start:stop].cpu())
        dtypes.add(dtype_name(weight.dtype))
    return {
        "scheme": SCHEME, "config": None, "tokenizer": None, "rounded_to": dtypes.pop() if len(dtypes) == 1 else None,
        "weights": {module: sample_digest(*source) for module, source in sources.items()},
        "full": {
            "scheme": FULL_SCHEME,
            "weights": dict(zip(sources, value_digests(list(sources.values())), strict=True)),
        },
    }  # fmt: skip


def check_live_base(patch: Patch, model: nn.Module) -> None:
    """Raise an error if the weights of a model in memory are not those that the patch was trained on.

    Only adapted weights are compared, by samples. A patch without a fingerprint passes.

    Raises:
        PatchError: other weights, also if they differ by the rounding of another dtype, or are quantised.
    """
    recorded = patch.metadata.get("base")
    if recorded is None:
        return
    dtype = parse_dtype(recorded.get("rounded_to"))
    names = [name for name, layer in patch.layers.items() if not layer.num_experts]
    differing = []
    for name in names:
        weight = model.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        flat = weight.detach().reshape(-1).to(dtype or weight.dtype)
        actual = sample_digest(tuple(weight.shape), partial(_read_flat, flat))
        if recorded["weights"].get(name) != actual:
            differing.append(name)
    if differing:
        raise RefusedBaseError(
            f"{patch.folder}: was trained on another base than this model: {len(differing)} of {len(names)} adapted"
            f" weights differ ({differing[0]} first); a base that is quantised, or rounded to another dtype than in"
            " training, counts as another",
            "base",
        )


def _read_flat(flat: Tensor, start: int, stop: int) -> Tensor:
    return flat[start:stop].cpu()
