"""Read adapter_config.json as PEFT does.

A key that changes the forward pass and is not implemented is refused by name, never ignored.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lorakit.errors import PatchError, did_you_mean, translate_error
from lorakit.files.patterns import as_ending, check_expression
from lorakit.files.text import unique_keys
from lorakit.lora.methods import method_of, peft_keys

CONFIG_FILE: Final = "adapter_config.json"
MAX_CONFIG_BYTES: Final = 32 << 20
HARMLESS: Final = {  # do not change what a trained adapter computes
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout",
    "lora_ga_config", "megatron_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r",
    "rank_pattern", "revision", "target_modules", "task_type", "fan_in_fan_out",
    "ensure_weight_tying", "runtime_config", "init_lora_weights", "bias", "modules_to_save",
    "target_parameters", "trainable_token_indices",
}  # fmt: skip
TRAINING_STATE: Final = {"velora_config": "lora_velora_embed", "monteclora_config": "lora_monteclora_sampler"}
"""setting that changes training alone -> name of its tensors, which no trained adapter needs; a patch holds neither"""
MAX_PATTERNS: Final = 10_000  # of rank_pattern and of alpha_pattern, each of which is tried for each layer
BIASES: Final = ("none", "all", "lora_only")
TYPES: Final[Sequence[tuple[Callable[[Any], bool], str, Sequence[str]]]] = (
    (lambda value: type(value) is bool, "bool", [*peft_keys(), "ensure_weight_tying", "lora_bias"]),
    (lambda value: type(value) is str and value.isprintable(), "a text that can be printed",
     ["base_model_name_or_path", "revision"]),
    (lambda value: type(value) in (int, float), "int or float", ["lora_dropout"]),
    (BIASES.__contains__, f"one of {', '.join(BIASES)}", ["bias"]),
    (lambda value: type(value) is str or _is_list(value, str), "a regular expression or a list of names",
     ["target_modules", "exclude_modules"]),
    (lambda value: _is_list(value, str) and all(value), "a list of names", ["modules_to_save", "target_parameters"]),
    (lambda value: type(value) is int or _is_list(value, int), "layer numbers", ["layers_to_transform"]),
    (lambda value: all(_is_list(ids, int) and min(ids, default=0) >= 0 for ids in _by_module(value).values()),
     "lists of token ids", ["trainable_token_indices"]),
)  # fmt: skip
"""whether a value is of a type, the type in words, and the keys whose values are of it or null"""
CHANGES_BASE: Final = re.compile(r"pissa|olora|corda|loftq|lora_ga", re.IGNORECASE)


def arithmetic_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an ``adapter_config.json`` that decide by which numbers the tensors are multiplied."""
    keys = ["r", "lora_alpha", "rank_pattern", "alpha_pattern", *peft_keys(), "fan_in_fan_out"]
    return {key: raw[key] for key in keys if raw.get(key) is not None}


@dataclass(frozen=True)
class PatchConfig:
    """The settings of a patch: method, rank and alpha of each layer, and the base's name."""

    method: str
    rank: int
    alpha: float
    dropout: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    base_model: str | None
    revision: str | None
    targets: str | tuple[str, ...]  # regular expression of full names, or names and suffixes; empty: no layer
    exclude: str | tuple[str, ...]
    layers: tuple[int, ...] | None  # numbers of the layers that `targets` selects from; None: all
    modules_to_save: tuple[str, ...]
    target_parameters: tuple[str, ...]  # 3-D parameters of experts, by name or suffix
    token_indices: Mapping[str, tuple[int, ...]]
    """embedding, by name or suffix -> tokens whose rows the patch holds; an empty name matches any embedding"""
    raw: Mapping[str, Any] = field(repr=False)  # every key of the file but TRAINING_STATE, unknown ones included


def read_config(folder: Path) -> PatchConfig:
    """Return the settings in a patch folder. Raises PatchError: no LoRA, a malformed value, or a foreign setting."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise PatchError(_without_config(folder))
    if (size := path.stat().st_size) > MAX_CONFIG_BYTES:
        raise PatchError(f"{path}: {size:,} bytes, {MAX_CONFIG_BYTES:,} are allowed")
    with translate_error((ValueError, RecursionError, OSError), PatchError, f"{path}: cannot be read"):
        config = json.loads(path.read_bytes(), object_pairs_hook=unique_keys)
    return parse_config(path, config)


def _without_config(folder: Path) -> str:
    """Return what a folder without an adapter_config.json is."""
    if not folder.is_dir():
        patches = (path.parent.name for path in folder.parent.glob(f"*/{CONFIG_FILE}"))
        near = did_you_mean(folder.name, patches, within=folder.parent)
        return f"{folder}: no such folder; looked for {folder.absolute()}.{near}"
    if (folder / "config.json").is_file():
        return f"{folder}: a whole model, not a patch; use it as the base"
    text = f"{folder}: not a patch: it has no {CONFIG_FILE}; looked in {folder.absolute()}"
    if (folder / "run.json").exists():
        text += "; an unfinished run is there: lorakit train finishes it"
        if saved := sorted(path.parent for path in folder.glob(f"checkpoints/*/{CONFIG_FILE}")):
            text += f", and its newest checkpoint is a patch: {saved[-1]}"
    if inner := sorted(str(path.parent) for path in folder.glob(f"*/{CONFIG_FILE}")):
        text += f"; there are patches inside: {', '.join(inner[:5])}"
    return text


def parse_config(path: Path, config: Any) -> PatchConfig:
    """Return the settings in the parsed content of an adapter_config.json. Raises PatchError as ``read_config``."""
    facts = config if isinstance(config, dict) else {"peft_type": type(config).__name__}
    kind = facts.get("peft_type")
    if kind != "LORA" and "lora_parameters" in facts:
        raise PatchError(f"{path}: an adapter of MLX; make it a patch with `lorakit convert {path.parent} --out DIR`")
    if kind != "LORA":
        raise PatchError(f"{path}: peft_type is {kind!r}; lorakit reads LORA. PEFT can merge others (merge_and_unload)")
    _check_settings(path, config)
    rank = config.get("r", 8)
    alpha = config.get("lora_alpha", 8)
    ranks, alphas = (_pattern(path, key, config.get(key)) for key in ("rank_pattern", "alpha_pattern"))
    numbers = {"r": [rank], "rank_pattern": ranks.values(), "lora_alpha": [alpha], "alpha_pattern": alphas.values()}
    for key, values in numbers.items():
        # less is an update without effect
        kinds, what = ((int, float), "number from 1e-9") if "alpha" in key else ((int,), "whole number from 1")
        for value in values:
            if type(value) not in kinds or not 1e-9 <= value < 1e9:
                raise PatchError(f"{path}: {key} must be a {what} to 1e9, got {value!r}")
    method = method_of(config)
    if method is None:
        on = ", ".join(key for key in peft_keys() if config.get(key))
        raise PatchError(f"{path}: no method of lorakit has all of {on}")
    selectors = (config.get(key) or () for key in ("target_modules", "exclude_modules"))
    targets, exclude = (value if isinstance(value, str) else tuple(value) for value in selectors)
    layers = config.get("layers_to_transform")
    token_ids = _by_module(config.get("trainable_token_indices") or {})
    return PatchConfig(
        method=method,
        rank=rank,
        alpha=alpha,
        dropout=config.get("lora_dropout") or 0.0,
        rank_pattern=ranks,
        alpha_pattern=alphas,
        base_model=config.get("base_model_name_or_path"),
        revision=config.get("revision"),
        targets=targets,
        exclude=exclude,
        layers=(layers,) if isinstance(layers, int) else None if layers is None else tuple(layers),
        modules_to_save=tuple(config.get("modules_to_save") or ()),
        target_parameters=tuple(config.get("target_parameters") or ()),
        token_indices={module: tuple(ids) for module, ids in token_ids.items() if ids},
        raw={key: value for key, value in config.items() if not value or key not in TRAINING_STATE},
    )


def _check_settings(path: Path, config: Mapping[str, Any]) -> None:
    """Raise PatchError for a setting that is not implemented, or for a value of another type than its key's."""
    known = _known_settings(config)
    off: tuple[Any, ...] = (None, "none", "", [], {})
    unknown = [key for key, value in config.items() if key not in known and value is not False and value not in off]
    if isinstance(config.get("init_lora_weights"), str) and CHANGES_BASE.search(config["init_lora_weights"]):
        unknown.append("init_lora_weights")  # because it was trained on W0 minus a start that is not in the patch
    if unknown:
        settings = ", ".join(f"{key if key.isprintable() else repr(key)}: {config[key]!r}" for key in unknown)
        problem = f"settings lorakit does not compute, so the patch would mean something else: {settings}"
        remedy = "Merge it with PEFT (merge_and_unload); lorakit extract makes a patch of the result"
        raise PatchError(f"{path}: {problem}. {remedy}")
    for is_valid, what, keys in TYPES:
        for key in keys:
            if (value := config.get(key)) is not None and not is_valid(value):
                raise PatchError(f"{path}: {key} must be {what}, got {value!r}")
    if not 0 <= (config.get("lora_dropout") or 0.0) <= 1:
        raise PatchError(f"{path}: lora_dropout must be from 0 to 1, got {config['lora_dropout']!r}")
    for key in ("target_modules", "exclude_modules"):
        if isinstance(value := config.get(key), str):
            _check_expression(path, key, value, value)


def _known_settings(config: Mapping[str, Any]) -> set[str]:
    """Return the keys that are computed beside the others of a config, or change nothing."""
    known = HARMLESS | set(peft_keys()) | TRAINING_STATE.keys()
    blocks = config.get("use_bdlora")
    if isinstance(blocks, dict) and blocks.get("nblocks") == 1:
        known.add("use_bdlora")  # A and B of one block are those of plain LoRA
    if not config.get("use_dora") and config.get("bias") in (None, "none"):
        known.add("lora_bias")  # DoRA's gain would scale it, and `bias` gives a layer a second one
    return known


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(one) is kind for one in value)


def _by_module(token_ids: Any) -> dict[str, Any]:
    return token_ids if isinstance(token_ids, dict) else {"": token_ids}


def _check_expression(path: Path, key: str, text: str, used: str) -> None:
    try:
        check_expression(used)
    except ValueError as problem:
        raise PatchError(f"{path}: {key}: {text!r} is {problem}") from None


def _pattern(path: Path, key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict | None):
        raise PatchError(f"{path}: {key} must be a mapping, got {value!r}")
    if len(value or ()) > MAX_PATTERNS:
        raise PatchError(f"{path}: {key} has {len(value or ())} entries; at most {MAX_PATTERNS} are read")
    for pattern in value or {}:
        _check_expression(path, key, pattern, as_ending(pattern))  # some fail only as it is used
    return value or {}
