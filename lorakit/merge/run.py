"""The merge, top to bottom: plan it, write it file by file, check that everything went in, give it its name."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from lorakit.durable import digest, json_text, write_json
from lorakit.errors import MergeError, TryAgainLater
from lorakit.merge.plan import Plan, Weighted, plan_merge, shared_places
from lorakit.merge.shard import write_shard
from lorakit.merge.staging import Lines, Staging, staged
from lorakit.merge.verify import verify_merge
from lorakit.merge.vocabulary import TOKENIZER_FILES
from lorakit.model import find_base, load_skeleton
from lorakit.patch import BaseFiles, Shapes, check_base, open_base_files, open_patch
from lorakit.patch.base_files import INDEX, read_json
from lorakit.patch.patch import TENSOR_FILE
from lorakit.version import VERSION

NOT_COPIED: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
TEMPLATES: Final = "additional_chat_templates"
LEDGER: Final = "merge.json"


def merge(
    base: str | Path,
    *adapters: str | Path | tuple[str | Path, float],
    out: str | Path,
    revision: str | None = None,
    dtype: str | None = None,
    untie: bool = False,
    verify: bool = False,
    allow_base_mismatch: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write the base with the patches merged in as a normal model folder; returns ``out``.

    Each touched tensor is the float64 sum rounded once; all others are copied byte for byte, or converted when
    ``dtype`` is given. An adapter may be given as (folder, weight). ``out`` appears when it is complete; after an
    interruption the same call goes on from the last finished file. ``merge.json`` in it says what went where.

    ``untie``: write a head of its own where a patch changes one of two tensors that share their values.
    ``verify``: run prompts through base + adapters and through the result, and fail where they differ by more than
    rounding explains.

    Raises:
        MergeError: ``out`` exists, or a layer cannot be merged; nothing is left. PatchError: a patch is damaged or of
        another base. TryAgainLater: the disk is full; what is finished is kept.
    """
    out, folder = Path(out), find_base(str(base), revision)
    if out.exists():
        raise MergeError(f"out: {out} exists already; choose another folder, or remove it")
    if not adapters:
        raise MergeError("no adapter to merge: name at least one patch folder")
    pairs = [adapter if isinstance(adapter, tuple) else (adapter, 1.0) for adapter in adapters]
    weighted = [
        Weighted(number, Path(path), open_patch(path), float(weight)) for number, (path, weight) in enumerate(pairs)
    ]
    files, shapes = open_base_files(folder), Shapes.of(load_skeleton(folder))
    plan = plan_merge(files, shapes, weighted, dtype=dtype, untie=untie)
    if not allow_base_mismatch:
        for one in weighted:
            check_base(one.patch, folder)
    with staged(out, _inputs(files, weighted, [dtype, untie, allow_base_mismatch])) as staging:
        lines = _write_shards(plan, staging, out, check_base=not allow_base_mismatch, say=say)
        _check_ledger(plan, shapes, weighted, lines)
        _write_rest(files, plan, staging.model)
        ledger: dict[str, Any] = {
            "lorakit": VERSION, "base": str(base), "revision": revision, "allow_base_mismatch": allow_base_mismatch,
            "dtype": dtype, "untied": plan.untied, "merged": lines,
            "adapters": [
                {"path": str(one.folder), "weight": one.weight, "sha256": digest(one.folder / TENSOR_FILE)}
                for one in weighted
            ],
        }  # fmt: skip
        if verify:
            ledger["verified"] = verify_merge(folder, weighted, staging.model, lines, say)
        write_json(staging.model / LEDGER, ledger)
        staging.commit()
    return out


def _write_shards(plan: Plan, staging: Staging, out: Path, *, check_base: bool, say: Callable[[str], None]) -> Lines:
    """Every file of the model. One is made durable while the next is computed."""
    lines: Lines = []
    _check_space(plan, staging, out)
    with ThreadPoolExecutor(1) as disk:
        finishing: Future[None] | None = None
        for number, (name, pieces) in enumerate(plan.shards.items(), 1):
            done = staging.finished(name)
            before = "" if done is None else "finished before, "
            if done is None:
                part = staging.folder / f"{name}.part"
                done = write_shard(part, pieces, check_base=check_base)
                if finishing is not None:
                    finishing.result()
                finishing = disk.submit(staging.finish, part, name, done)
            say(f"{number}/{len(plan.shards)}  {name}  {before}{len(done)} updates merged")
            lines += done
        if finishing is not None:
            finishing.result()
    return lines


def _check_ledger(plan: Plan, shapes: Shapes, weighted: Sequence[Weighted], lines: Lines) -> None:
    """Every layer and whole tensor of every patch was applied, once; and something changed.

    Raises:
        MergeError: names what is missing or was applied twice.
    """
    applied = [(line["patch"], line.get("layer") or line["parameter"], line["tensor"]) for line in lines]
    planned = [
        (part.of.number, part.place, piece.name) for piece in plan.pieces() for part in (*piece.wholes, *piece.updates)
    ]
    if sorted(applied) != sorted(planned):
        raise MergeError(f"not applied exactly once: {sorted(set(planned) ^ set(applied))[:3]}")
    places = {(number, place) for number, place, _ in applied}
    for one in weighted:
        shared = set() if plan.untied else shared_places(shapes, one.patch)
        for place in (*one.patch.layers, *one.patch.whole_shapes):
            if (one.number, place) not in places and place not in shared:
                raise MergeError(f"{one.folder}: {place} was not merged")
    if not any(line["norm_of_change"] and line["lost_to_rounding"] < 1.0 for line in lines):
        raise MergeError("nothing would change: every update is zero, or lost in rounding to the base's dtype")


def _write_rest(files: BaseFiles, plan: Plan, model: Path) -> None:
    """Config, tokenizer, index and what else belongs to a model folder, with what the merge changes in them."""
    for path in sorted(files.folder.iterdir()):
        if path.is_file() and not path.name.endswith(NOT_COPIED) and not path.name.startswith("."):
            shutil.copyfile(path, model / path.name)
    if (files.folder / TEMPLATES).is_dir():
        shutil.copytree(files.folder / TEMPLATES, model / TEMPLATES, dirs_exist_ok=True)
    if plan.vocabulary is not None:
        for name in TOKENIZER_FILES:
            (model / name).unlink(missing_ok=True)
            if (plan.vocabulary.tokenizer / name).is_file():
                shutil.copyfile(plan.vocabulary.tokenizer / name, model / name)
    config = files.config()
    if changed := _changed_config(config, plan):
        (model / "config.json").write_text(json_text(changed))
    if (files.folder / INDEX).is_file():
        weight_map = {piece.name: name for name, pieces in plan.shards.items() for piece in pieces}
        index = read_json(files.folder / INDEX)
        metadata = index.get("metadata") or {}
        if weight_map != index["weight_map"] or plan.dtype or plan.vocabulary:
            metadata = {**metadata, "total_size": plan.num_bytes}
            metadata.pop("total_parameters", None)
            (model / INDEX).write_text(json_text({"metadata": metadata, "weight_map": weight_map}))


def _changed_config(config: dict[str, Any], plan: Plan) -> dict[str, Any] | None:
    changes: dict[str, Any] = {}
    if plan.untied:
        changes["tie_word_embeddings"] = False
    if plan.vocabulary is not None:
        changes["vocab_size"] = plan.vocabulary.num_tokens
    if plan.dtype is not None:
        changes["dtype"] = str(plan.dtype).removeprefix("torch.")
    if not changes:
        return None
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part.update({key: value for key, value in changes.items() if part is config or key in part})
            if "dtype" in changes:
                part.pop("torch_dtype", None)
    return config


def _check_space(plan: Plan, staging: Staging, out: Path) -> None:
    done = sum(path.stat().st_size for path in staging.model.iterdir())
    needed, free = plan.num_bytes - done, shutil.disk_usage(staging.folder).free
    if free < needed * 1.02:
        raise TryAgainLater(f"{out}: {needed} bytes are needed, {free} are free; free some space and run again")


def _inputs(files: BaseFiles, weighted: Sequence[Weighted], settings: list[Any]) -> str:
    """A digest of everything the merge is made from, so that only the same one is taken up again."""
    base = [(shard.path.name, os.stat(shard.path).st_size, os.stat(shard.path).st_mtime_ns) for shard in files.shards]
    patches = [(one.patch.digest, one.patch.config.raw, one.weight) for one in weighted]
    return hashlib.sha256(
        json.dumps([VERSION, str(files.folder.resolve()), base, patches, settings]).encode()
    ).hexdigest()
