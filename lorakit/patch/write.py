"""Write a patch durably, with its model card: the same bytes for the same adapter, verified by reading them back.

The card has the patch's settings, its origin and its use, and no dates or times.
"""

import json
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from statistics import mode
from typing import Any, Final

import xxhash
from torch import Tensor

from lorakit.errors import PatchError
from lorakit.files.atomic import Content, atomic_folder, json_text, sync_path, write_files
from lorakit.files.safetensors import file_parts
from lorakit.lora.methods import METHODS, PLAIN, peft_keys
from lorakit.lora.targets import matches
from lorakit.patch.adapter_config import CONFIG_FILE, arithmetic_settings, parse_config
from lorakit.patch.compatibility import new_token_calls, peft_problems
from lorakit.patch.own_head import own_head
from lorakit.patch.patch import SIDECAR, TENSOR_FILE, Patch, PatchLayer, TokenRows, check_finite
from lorakit.patch.peft_names import B_BIAS, ROWS_PART, expert_modules, full_tensor_key, update_key
from lorakit.patch.prompting import ASSETS, trained_form
from lorakit.patch.read import open_patch

NO_TARGETS: Final = "dummy-target-modules"
"""PEFT's name for an adapter without linear layers, which has token rows or full tensors alone"""
PEFT_RANK: Final = 8
PEFT_ALPHA: Final = 8.0  # PEFT's defaults, which an adapter without linear layers does not use
TEMPLATE: Final = ASSETS / "model_card.md"


def write_patch(folder: str | Path, patch: Patch, *, overwrite: bool = False, card: str | None = None) -> Path:
    """Write a patch from memory and return its folder. A patch of PEFT is written with the same tensors and keys.

    ``card``: the README.md; None writes one from the metadata. Raises PatchError, with nothing written, if a patch or
    another README.md is there and ``overwrite`` is off, or a value is not finite.
    Raises TemporaryFailure if the disk is full; the old files are unchanged.
    """
    folder = Path(folder)
    if not overwrite and (folder / CONFIG_FILE).exists():
        raise PatchError(f"{folder}: holds a patch already; choose another folder or pass overwrite=True")
    if not overwrite and (folder / "README.md").exists():
        raise PatchError(f"{folder}: holds a README.md that would be replaced by the model card; choose another folder")
    keys = keyed_tensors(patch)
    check_finite(keys.items())
    metadata = {"format": "pt"} | ({"lorakit": json.dumps(patch.metadata, sort_keys=True)} if patch.metadata else {})
    state = xxhash.xxh3_128()
    for part in file_parts(keys, metadata):
        state.update(part)
    settings = arithmetic_settings(patch.config.raw)
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, Content] = {
        TENSOR_FILE: lambda file: file.writelines(file_parts(keys, metadata)),
        SIDECAR: json_text({"format": 1, "xxh3_128": {TENSOR_FILE: state.hexdigest()}, "settings": settings}),
        "README.md": card or model_card(folder.name, patch),
        CONFIG_FILE: json_text(patch.config.raw),
    }
    write_files(folder, files, last=CONFIG_FILE)
    open_patch(folder)  # which compares the digest with that of the file
    return folder


def write_new_patch(out: str | Path, patch: Patch, beside: Collection[Path] = ()) -> Path:
    """Write a patch into a new folder, with copies of the files ``beside``, complete or not at all; return the folder.

    Raises FileExistsError if ``out`` exists, TemporaryFailure if the disk is full.
    """
    out = Path(out)
    with atomic_folder(out) as staging:
        for path in beside:
            shutil.copyfile(path, staging / path.name)
        write_patch(staging, patch, card=model_card(out.name, patch))
    return out


def keyed_tensors(patch: Patch) -> dict[str, Tensor]:
    """Return the tensors of a patch by their keys in the file, sorted."""
    experts: dict[str, list[str]] = {}
    for module, _, parameter in (name.rpartition(".") for name, layer in patch.layers.items() if layer.num_experts):
        experts.setdefault(module, []).append(parameter)
    names_in_file = {
        f"{module}.{parameter}": name
        for module, parameters in experts.items()
        for parameter, name in expert_modules(module, parameters).items()
    }
    keys = {
        update_key(names_in_file.get(module, module), part, embedding=layer.embedding): tensor
        for module, layer in patch.layers.items()
        for part, tensor in layer.tensors.items()
    }
    keys |= {update_key(module, ROWS_PART, embedding=True): rows.tensor for module, rows in patch.token_rows.items()}
    for name, tensor in patch.full_tensors.items():
        key = full_tensor_key(name, patch.layers)
        if name in patch.bias_scales:
            key = update_key(name.removesuffix(".bias"), B_BIAS, embedding=False)
        keys[key] = tensor
    return dict(sorted(keys.items()))


def new_patch(
    layers: Mapping[str, PatchLayer],
    *,
    metadata: Mapping[str, Any],
    full_tensors: Mapping[str, Tensor] | None = None,
    rows: Mapping[str, TokenRows] | None = None,
    **settings: Any,
) -> Patch:
    """Return a patch in memory from updates of one method. Raises PatchError without updates, or if one is not finite.

    ``metadata``: lorakit's own facts. ``rows``: by embedding. ``settings``: further ones of ``_config_json``.
    """
    full_tensors = dict(full_tensors or {})
    rows = dict(rows or {})
    if not (layers or full_tensors or rows):
        raise PatchError("a patch without tensors: there is nothing to save")
    check_finite((f"{module}.{part}", t) for module, layer in layers.items() for part, t in layer.tensors.items())
    check_finite([*full_tensors.items(), *((name, token_rows.tensor) for name, token_rows in rows.items())])
    config = parse_config(Path(CONFIG_FILE), _config_json(layers, full_tensors, rows, **settings))
    shapes = {name: tuple(tensor.shape) for name, tensor in full_tensors.items()}
    return Patch(Path(), config, layers, full_tensors, shapes, metadata=metadata, token_rows=rows)


def _config_json(
    layers: Mapping[str, PatchLayer], full_tensors: Collection[str], rows: Mapping[str, TokenRows], *,
    base_model: str | None, all_modules: Iterable[str] | None = None, dropout: float = 0.0, revision: str | None = None,
    task_type: str | None = "CAUSAL_LM", fan_in_fan_out: bool = False, tied: bool = False,
    head_parts: Iterable[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Return the content of adapter_config.json.

    ``all_modules``: every module name of the model, so that targets can be written as suffixes; None writes full names.
    ``tied``: True if head and embedding have the same update. ``head_parts``: modules with full tensors alone.
    """
    experts = [name for name, layer in layers.items() if layer.num_experts]
    targets = sorted(layers.keys() - set(experts))
    suffixes = sorted({name.rpartition(".")[2] for name in targets})
    # suffixes such as ``q_proj`` if they select exactly these modules, else full names
    if all_modules is not None and {name for name in all_modules if matches(suffixes, name)} == set(targets):
        targets = suffixes
    # full tensors are declared to PEFT by `bias` for biases, and `modules_to_save` for the rest. A weight beside an
    # update, which PEFT saves of adapted embeddings, is declared by the update
    owners = {
        name: next((part for part in head_parts if f".{part}." in f".{name}"), name.rpartition(".")[0])
        for name in full_tensors
    }
    modules = {owner for name, owner in owners.items() if not name.endswith(".bias")} - layers.keys()
    biased = {owner for name, owner in owners.items() if name.endswith(".bias")} - modules
    optional = {
        # without the part that differs between layers, such as ``mlp.experts.gate_up_proj``
        "target_parameters": sorted({re.sub(r"^.*\.\d+\.", "", name) for name in experts}),
        "trainable_token_indices": {module: list(token_rows.tokens) for module, token_rows in rows.items()},
        "ensure_weight_tying": tied,
        "modules_to_save": sorted(modules),
    }
    method = METHODS[next((layer.method for layer in layers.values()), PLAIN)]
    rank = mode(layer.rank for layer in layers.values()) if layers else PEFT_RANK
    alpha = mode(layer.alpha for layer in layers.values()) if layers else PEFT_ALPHA
    return {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": base_model,
        "revision": revision,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _plain(alpha),
        "lora_dropout": dropout,
        # anchored, because PEFT matches keys with an optional prefix
        "rank_pattern": {f"^{re.escape(name)}": one.rank for name, one in layers.items() if one.rank != rank},
        "alpha_pattern": {f"^{re.escape(name)}": _plain(x.alpha) for name, x in layers.items() if x.alpha != alpha},
        "target_modules": targets if layers else NO_TARGETS,
        **{key: method.peft.get(key, False) for key in peft_keys()},
        "fan_in_fan_out": fan_in_fan_out,
        "bias": "none" if not biased else "lora_only" if biased <= layers.keys() else "all",
        **{key: value for key, value in optional.items() if value},
    }


def _plain(number: float) -> int | float:
    return int(number) if number == int(number) else number


def remove_patch(folder: Path) -> None:
    """Remove a patch's files, the config first, because a folder with a config counts as a patch."""
    for name in (CONFIG_FILE, TENSOR_FILE, SIDECAR):
        (folder / name).unlink(missing_ok=True)
        sync_path(folder)


def model_card(name: str, patch: Patch, recipe: Mapping[str, Any] | None = None) -> str:
    """Return the README.md of a patch folder, for the hub too. ``recipe``: its keys that differ from the defaults."""
    import jinja2

    metadata = patch.metadata
    head = own_head(patch)
    ways = {"converted": "converted from another format", "combined": "combined from several patches",
            "extracted": "extracted from two full models"}  # fmt: skip
    way = next((way for key, way in ways.items() if key in metadata), "made")
    origin = f"{way} with lorakit {metadata['lorakit']}" if "lorakit" in metadata else "written by another program"
    rows = metadata.get("data", {}).get("train", {})
    settings = metadata.get("recipe", {})
    train = settings.get("train", {})
    targets = settings.get("adapter", {}).get("targets")
    updates = patch.layers.values()
    facts = {
        "layers": len(updates) or None,
        "method": patch.config.method if updates else None,
        "rank": ", ".join(map(str, sorted({one.rank for one in updates}))) or None,
        "alpha": ", ".join(f"{alpha:g}" for alpha in sorted({one.alpha for one in updates})) or None,
        **metadata.get("adapter", {}),
        "labels": ", ".join(head.labels) if head and head.labels else None,
        "targets": targets if isinstance(targets, str | None) else ", ".join(targets),
        "learning rate": train.get("learning_rate"),
        "schedule": train.get("schedule"),
        "batch size": train.get("batch_size"),
        "steps of the run": train.get("steps"),
        "epochs": None if not train or train.get("steps") else train.get("epochs") or 1,
        "started from": metadata.get("start", {}).get("name"),
        "step": metadata.get("step"),
        "pairs" if rows.get("pairs") else "rows": rows.get("pairs") or rows.get("rows"),
        "label tokens of the rows": rows.get("label_tokens"),
    }
    # a block's own line is no line of the card
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True).from_string(
        TEMPLATE.read_text(encoding="utf-8")
    )
    return template.render(
        name=name,
        base_model=patch.config.base_model,
        origin=origin,
        properties=[pair for pair in facts.items() if pair[1] is not None],
        results=metadata.get("results"),
        call="generate" if head is None else "classify" if head.labels else "reward",
        values=None if head is None else head.num_values,
        tokenizer=settings.get("base", {}).get("tokenizer"),
        peft_problems="; ".join(peft_problems(patch)),
        new_token_calls=new_token_calls(patch.new_tokens) if patch.new_tokens else None,
        notes=trained_form(metadata).notes() if head is None else [],
        recipe=json.dumps(recipe, indent=1, sort_keys=True) if recipe else None,
    )
