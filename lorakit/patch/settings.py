"""Read from a patch the settings that an adapter on top of it has: keys of a recipe's `adapter` section."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from lorakit.files.patterns import as_ending, matches_beginning
from lorakit.lora.methods import METHODS, saved_as
from lorakit.patch.patch import Patch

SELECTION: Final = ("targets", "exclude", "layers")
"""keys that select layers together, so that they are taken from the patch together or not at all"""
FIXED: Final = (
    "method", "rank", "alpha", *SELECTION, "target_parameters", "rank_pattern", "alpha_pattern", "bias",
    "modules_to_save", "trainable_tokens", "new_tokens", "tied_head",
)  # fmt: skip
"""keys of the `adapter` section that a patch decides"""


def patch_settings(patch: Patch) -> dict[str, Any]:
    """Return the keys of the `adapter` section as a patch has them."""
    config = patch.config
    raw = config.raw
    linear = tuple(name for name, layer in patch.layers.items() if not layer.num_experts)
    targets = config.targets
    is_tied = bool(raw.get("ensure_weight_tying"))  # PEFT's: the patch has head and embedding, the config one of them
    full_names = [f".{name}" for name in patch.full_shapes]  # of PEFT's names for a head one is there
    modules_to_save = tuple(name for name in config.modules_to_save if any(f".{name}." in one for one in full_names))
    if is_tied and modules_to_save:
        full = (name.rpartition(".")[0] for name in patch.full_shapes if not name.endswith(".bias"))
        modules_to_save = tuple(sorted(set(full)))
    exclude = config.exclude or None
    layers = config.layers
    if not targets or not linear or is_tied or raw.get("layers_pattern"):  # which lorakit has no key for
        targets = linear
        exclude = None
        layers = None
    biased = {name for name in patch.full_shapes if name.endswith(".bias")}
    rows = next(iter(patch.token_rows.values()), None)
    new = set(patch.new_tokens.values())
    known = () if rows is None else tuple(token for token in rows.tokens if token not in new)
    method = patch.metadata.get("adapter", {}).get("method")  # which a config cannot name always: of `lora_fa` `lora`
    if not isinstance(method, str) or method not in METHODS or saved_as(method) != config.method:
        method = config.method
    # a patch without updates has no method, rank and alpha
    numbers = {"method": method, "rank": config.rank, "alpha": float(config.alpha)} if patch.layers else {}
    return {
        **numbers,
        "targets": targets, "exclude": exclude, "layers": layers,
        "target_parameters": config.target_parameters,
        "rank_pattern": _matching(config.rank_pattern, patch.layers),
        "alpha_pattern": {key: float(alpha) for key, alpha in _matching(config.alpha_pattern, patch.layers).items()},
        "bias": "lora_only" if patch.bias_scales else (raw.get("bias") or "none") if biased else "none",
        "modules_to_save": modules_to_save,
        "trainable_tokens": known, "new_tokens": tuple(patch.new_tokens),
        "tied_head": "untie",
    }  # fmt: skip


def _matching(pattern: Mapping[str, Any], layers: Iterable[str]) -> dict[str, Any]:
    """Return the entries of a pattern that mean a layer of the patch; PEFT allows others, a recipe does not."""
    return {key: value for key, value in pattern.items() if any(matches_beginning(as_ending(key), n) for n in layers)}
