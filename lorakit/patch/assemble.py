"""What a checked patch file holds, put together: every tensor is known, in its place, and as the settings say."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lorakit.errors import PatchError, did_you_mean
from lorakit.files.safetensors import SafetensorsFile
from lorakit.patch.adapter_config import PatchConfig
from lorakit.patch.lazy import LazyTensors
from lorakit.patch.patch import FLOATS, Caps, Patch, PatchLayer, TokenRows
from lorakit.patch.peft_names import (
    EMBEDDING_PARTS,
    LINEAR_PARTS,
    MAGNITUDE_PART,
    CopyName,
    RowsName,
    UpdateName,
    WholeName,
    expert_modules,
    parse_key,
    rows_key,
    stripped,
    whole_key,
)


def build_patch(folder: Path, config: PatchConfig, file: SafetensorsFile, caps: Caps) -> Patch:
    """The patch that a checked header describes; of its tensors only token rows are read.

    Raises:
        PatchError: a tensor that is missing, unknown, misplaced or mis-shaped, or one that the settings do not tell of.
    """
    updates: dict[tuple[str, bool | None], dict[str, str]] = {}
    rows: list[str] = []
    whole: dict[str, str] = {}
    copies: dict[str, CopyName] = {}
    for key, entry in file.entries.items():
        name = parse_key(key)
        if entry.dtype not in FLOATS:
            raise PatchError(f"{file.path}: {key}: {entry.dtype}; the tensors of a patch are 16, 32 or 64 bit floats")
        if isinstance(name, UpdateName):
            updates.setdefault((name.module, name.embedding), {})[name.part] = key
        elif isinstance(name, RowsName):
            rows.append(name.module)
        elif isinstance(name, WholeName):
            whole[name.parameter] = key
        elif isinstance(name, CopyName):
            copies[key] = name
        else:
            raise PatchError(_unknown(file.path, key))
    if not updates and not whole and not rows:
        raise PatchError(f"{file.path}: holds no tensors; the adapter was lost when it was saved")
    _add_magnitudes(updates)
    if len({module for module, _ in updates}) < len(updates):
        raise PatchError(f"{file.path}: a layer has both lora_A and lora_embedding_A")
    experts = _experts(file.path, config, [module for module, _ in updates])
    layers = {
        experts.get(module, module): _layer(
            file, config, experts.get(module, module), keys, bool(embedding), caps, stacked=module in experts
        )
        for (module, embedding), keys in updates.items()
    }
    _check_told(file.path, config, layers, rows)
    _check_whole(file.path, whole, layers)
    _check_copies(file, copies, whole)
    shapes = {parameter: file.entries[key].shape for parameter, key in whole.items()}
    kept = LazyTensors(file, {key: key for key in copies})
    facts = _facts(file.path, file.metadata)
    return Patch(
        folder, config, layers, LazyTensors(file, whole), shapes, kept, facts,
        {module: _rows(file, config, module) for module in rows},
    )  # fmt: skip


def _check_told(path: Path, config: PatchConfig, layers: Mapping[str, PatchLayer], rows: list[str]) -> None:
    """What the settings tell of is there."""
    if config.target_parameters and not any(layer.num_experts for layer in layers.values()):
        raise PatchError(f"{path}: target_parameters names experts, and no tensors of theirs are there")
    if config.token_indices and not rows:
        raise PatchError(f"{path}: trainable_token_indices names tokens, and their rows are not there")


def _add_magnitudes(updates: dict[tuple[str, bool | None], dict[str, str]]) -> None:
    """Magnitudes join the factors of their layer, which tell what it is."""
    for module, embedding in list(updates):
        for own in (True, False) if embedding is None else ():
            if (module, own) in updates:
                updates[module, own] |= updates.pop((module, None))
                break


def _experts(path: Path, config: PatchConfig, modules: list[str]) -> dict[str, str]:
    """Where the file has the factors of experts -> their parameter, as the config names them."""
    found: dict[str, str] = {}
    by_name: dict[str, set[str]] = {}
    for name in modules:
        by_name.setdefault(stripped(name), set()).add(name)
    for module, held in by_name.items():
        own = [
            name.rpartition(".")[2] for name in config.target_parameters
            if not (prefix := name.rpartition(".")[0]) or module == prefix or module.endswith(f".{prefix}")
        ]  # fmt: skip
        places = {place: f"{module}.{parameter}" for parameter, place in expert_modules(module, own).items()}
        if held <= {module} and not own:
            continue
        if held != set(places):
            raise PatchError(
                f"{path}: {module}: factors of {len(held)} parameters of experts are there,"
                f" target_parameters names {len(own)}: {', '.join(own) or 'none'}"
            )
        found |= places
    return found


def _rows(file: SafetensorsFile, config: PatchConfig, module: str) -> TokenRows:
    tokens = next(
        (
            ids
            for name, ids in config.token_indices.items()
            if not name or module == name or module.endswith(f".{name}")
        ),
        (),
    )
    tensor = LazyTensors(file, {module: rows_key(module)})[module]
    if not tokens or tensor.dim() != 2 or tensor.shape[0] != len(tokens):
        raise PatchError(
            f"{file.path}: {module}: rows {tuple(tensor.shape)} for {len(tokens)} tokens (trainable_token_indices)"
        )
    return TokenRows(tokens, tensor)


def _unknown(path: Path, key: str) -> str:
    suffixes = [*LINEAR_PARTS, *EMBEDDING_PARTS]
    end = ".".join(key.rsplit(".", 2)[-2:])
    return (
        f"{path}: {key}: a tensor lorakit does not know; it reads base_model.model.<module>.{{{', '.join(suffixes)}}}"
        f" and whole tensors base_model.model.<parameter>.{did_you_mean(end, suffixes)}"
    )


def _layer(
    file: SafetensorsFile, config: PatchConfig, module: str, keys: Mapping[str, str], embedding: bool, caps: Caps, *,
    stacked: bool,
) -> PatchLayer:  # fmt: skip
    path, entries = file.path, {part: file.entries[key] for part, key in keys.items()}
    for part in ("lora_A", "lora_B"):
        if part not in entries:
            raise PatchError(f"{path}: {module}.{part} is missing")
        if len(entries[part].shape) != 2:
            raise PatchError(f"{path}: {module}.{part}: {entries[part].shape}, not a matrix")
    rank, alpha = config.rank_of(module), config.alpha_of(module)
    a, b = entries["lora_A"].shape, entries["lora_B"].shape
    count = a[0] // rank if stacked else 1
    if a[0] != rank * count or b[1] != rank * count or not count:
        raise PatchError(f"{path}: {module}: the config says rank {rank}, but A is {a} and B is {b}")
    if rank > caps.rank:
        raise PatchError(f"{path}: {module}: rank {rank}, {caps.rank} is allowed (Caps.rank)")
    _check_magnitude(path, config, module, entries, b[0])
    return PatchLayer(
        config.method, rank, alpha, (b[0], a[1]), LazyTensors(file, keys), embedding, count if stacked else 0
    )


def _check_magnitude(path: Path, config: PatchConfig, module: str, entries: Mapping[str, Any], size: int) -> None:
    """A magnitude is there when the config says so, and not otherwise."""
    expected = "dora" in config.method
    if expected != (MAGNITUDE_PART in entries):
        raise PatchError(
            f"{path}: {module}: use_dora is {expected} in the config, and {MAGNITUDE_PART} is"
            f" {'missing' if expected else 'there'}"
        )
    if expected and entries[MAGNITUDE_PART].shape != (size,):
        raise PatchError(f"{path}: {module}: {MAGNITUDE_PART} is {entries[MAGNITUDE_PART].shape}, not ({size},)")


def _check_whole(path: Path, whole: Mapping[str, str], layers: Mapping[str, Any]) -> None:
    """Every whole tensor stands where PEFT looks for it."""
    for parameter, key in whole.items():
        if key != (expected := whole_key(parameter, layers)):
            raise PatchError(f"{path}: {key}: PEFT would not read it; expected the name {expected}")


def _check_copies(file: SafetensorsFile, copies: Mapping[str, CopyName], whole: Mapping[str, str]) -> None:
    for key, name in copies.items():
        if name.parameter not in whole:
            raise PatchError(f"{file.path}: {key}: the file has no {name.parameter} that it would be a copy of")
        if not name.original and not torch.equal(file.read(key), file.read(whole[name.parameter])):
            raise PatchError(f"{file.path}: {key} and {whole[name.parameter]} hold different values for one tensor")


def _tells_packing(told: Any) -> bool:
    """Whether it says how a base was packed, or that it was not."""
    return told is None or (
        told["name"] in ("nf4", "fp4", "int8") and type(told["double"]) is bool
        and told["dtype"] in ("float32", "bfloat16", "float16")
        and isinstance(told["layers"], list) and all(isinstance(name, str) for name in told["layers"])
    )  # fmt: skip


def _facts(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        facts = json.loads(metadata.get("lorakit", "{}"))
        base, data, results = facts.get("base"), facts.get("data", {}), facts.get("results", {})
        right = base is None or (isinstance(base["scheme"], str) and isinstance(base["weights"], dict))
        right = right and (base is None or isinstance(base.get("rounded_to"), str | None))
        right = right and (base is None or _tells_packing(base.get("packed")))
        right = right and isinstance(facts.get("adapter", {}), dict)
        right = right and all(isinstance(name, str) for part in data.values() for name in part["sources"])
        right = right and all(isinstance(value, int | float) for value in results.values())
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        right = False
    if not right:
        raise PatchError(f"{path}: lorakit's own facts in the metadata are damaged")
    return dict(facts)
