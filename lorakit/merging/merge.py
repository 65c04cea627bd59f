"""The merge, top to bottom: plan it, write it file by file, check that everything went in, give it its name."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from lorakit.base.load import find_base, load_skeleton
from lorakit.base.quantized import linear_layers
from lorakit.errors import MergeError, TemporaryFailure
from lorakit.files.atomic import digest, file_signature, write_json
from lorakit.merging.compare import measure_error
from lorakit.merging.dequantized import (
    DEQUANTIZED,
    REASONS,
    TrainedQuantization,
    choose_target,
    trained_quantization,
    unpacked_files,
)
from lorakit.merging.folder import write_config_and_tokenizer
from lorakit.merging.plan import MergePlan, plan_merge, shared_places
from lorakit.merging.requantize import requantize_folder
from lorakit.merging.staging import Lines, Staging, staged
from lorakit.merging.tensors import WeightedPatch
from lorakit.merging.verify import verify_merge
from lorakit.merging.write import write_shard
from lorakit.patch import BaseFiles, BaseIdentity, BaseShapes, check_base, open_base_files, open_patch, unverified_note
from lorakit.patch.fingerprint import compared_by, full_digests
from lorakit.patch.patch import TENSOR_FILE
from lorakit.quant.files import is_quantized
from lorakit.version import VERSION

LEDGER: Final = "merge.json"


def merge(
    base: str | Path,
    *adapters: str | Path | tuple[str | Path, float],
    out: str | Path,
    revision: str | None = None,
    dtype: str | None = None,
    untie: bool = False,
    verify: bool = False,
    onto: str | None = None,
    requantize: bool = False,
    measure: bool = True,
    allow_base_mismatch: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write the base with the patches merged in as a normal model folder; returns ``out``.

    Each touched tensor is the float64 sum rounded once; all others are copied byte for byte, or converted when
    ``dtype`` is given. An adapter may be given as (folder, weight). ``out`` appears when it is complete; after an
    interruption the same call goes on from the last finished file. ``merge.json`` in it says what went where.

    ``untie``: write a head of its own where a patch changes one of two tensors that share their values.
    ``onto``: for a patch that was trained on a packed base, which weights it is added to: ``dequantized``, those that
    training saw (the default: nothing is lost but their rounding), or ``original``, those before they were packed.
    ``requantize``: pack the result again. ``measure``: run prompts through the packed base + adapters as it was
    trained, and through the result, and say how far they are apart.
    ``verify``: run prompts through base + adapters and through the result, and fail where they differ by more than
    rounding explains.

    Raises:
        MergeError: ``out`` exists, or a layer cannot be merged; nothing is left. PatchError: a patch is damaged or of
        another base. TemporaryFailure: the disk is full; what is finished is kept.
    """
    out, folder = Path(out), find_base(str(base), revision)
    _check_out(out, folder)
    weighted = _open(adapters)
    files, skeleton = open_base_files(folder), load_skeleton(folder)
    shapes, linear = BaseShapes.of(skeleton), list(linear_layers(skeleton))
    seen = trained_quantization(files, [one.patch for one in weighted], onto)
    onto = choose_target(files, seen, onto)
    _check_options(onto, seen, dtype, requantize=requantize, verify=verify)
    read = unpacked_files(files, seen) if seen is not None and onto == DEQUANTIZED else files
    plan = replace(plan_merge(read, shapes, weighted, dtype=dtype, untie=untie), unpacked=is_quantized(folder))
    if onto is not None:
        say(f"onto       {onto}: {REASONS[onto]}" + ("; packed again" if requantize else ""))
    _check_verifiable(plan, weighted, verify=verify)
    _check_bases(weighted, BaseIdentity(files), base, say, full=onto == DEQUANTIZED, mismatch=allow_base_mismatch)
    settings = [dtype, untie, allow_base_mismatch, onto, requantize]
    inputs = _inputs(files, weighted, settings)
    with staged(out, inputs) as staging:
        lines = _write_shards(plan, staging, out, check_base=not allow_base_mismatch, say=say)
        _check_ledger(plan, shapes, weighted, lines)
        write_config_and_tokenizer(files, plan, staging.model)
        if seen is not None and requantize:
            requantize_folder(staging.model, seen, linear)
        ledger: dict[str, Any] = {
            "lorakit": VERSION, "base": str(base), "revision": revision, "allow_base_mismatch": allow_base_mismatch,
            "dtype": dtype, "untied": plan.untied, "onto": onto, "requantized": requantize, "merged": lines,
            "adapters": _told(weighted),
        }  # fmt: skip
        if seen is not None:
            ledger["error"] = _measured(folder, weighted, staging.model, plan, seen, say) if measure else None
        if verify:
            ledger["verified"] = verify_merge(folder, weighted, staging.model, lines, say)
        write_json(staging.model / LEDGER, ledger)
        if _inputs(files, weighted, settings) != inputs:
            raise MergeError(f"{folder} or a patch changed while it was merged; nothing was written. Merge again")
        staging.commit()
    return out


def _check_options(
    onto: str | None, seen: TrainedQuantization | None, dtype: str | None, *, requantize: bool, verify: bool
) -> None:
    if requantize and seen is None:
        raise MergeError("requantize: no patch says that it was trained on a packed base; merge without --requantize")
    if requantize and dtype is not None:
        raise MergeError("requantize: the packed weights have their own form; leave --dtype out")
    if verify and onto == DEQUANTIZED:
        raise MergeError(
            "verify: compares with the base in floats; a merge onto dequantized weights measures its error instead"
        )
    if verify and requantize:
        raise MergeError("verify: packing again loses more than rounding; its error is measured instead")


def _check_verifiable(plan: MergePlan, weighted: Sequence[WeightedPatch], *, verify: bool) -> None:
    if verify and plan.vocabulary is not None:
        raise MergeError(
            f"verify: {weighted[0].folder} changes the vocabulary to {plan.vocabulary.num_tokens} tokens, which the"
            " base cannot run beside; leave --verify out"
        )


def _told(weighted: Sequence[WeightedPatch]) -> list[dict[str, Any]]:
    """The patches, for the ledger."""
    return [
        {
            "path": str(one.folder), "weight": one.weight, "sha256": digest(one.folder / TENSOR_FILE),
            "base_compared_by": compared_by(one.patch),
        }
        for one in weighted
    ]  # fmt: skip


def _check_bases(
    weighted: Sequence[WeightedPatch], identity: BaseIdentity, base: str | Path, say: Callable[[str], None], *, full: bool,
    mismatch: bool,
) -> None:  # fmt: skip
    """Is it the patches' base? ``full``: by every value now, since the merge itself reads other ones."""
    for one in weighted:
        if not mismatch:
            check_base(one.patch, identity, full=full and full_digests(one.patch) is not None)
        if (note := unverified_note(one.patch, base)) is not None:
            say(note)


def _measured(
    base: Path,
    weighted: Sequence[WeightedPatch],
    merged: Path,
    plan: MergePlan,
    seen: TrainedQuantization,
    say: Callable[[str], None],
) -> dict[str, Any] | None:
    """The error against what was trained, or None where that cannot be run beside the merged model."""
    experts = any(layer.num_experts for one in weighted for layer in one.patch.layers.values())
    if experts or plan.vocabulary is not None:
        say(f"error      not measured: {'experts are changed' if experts else 'the vocabulary changes'}")
        return None
    return measure_error(base, weighted, merged, seen, say)


def _check_out(out: Path, base: Path) -> None:
    if os.path.lexists(out):
        raise MergeError(f"out: {out} exists already; choose another folder, or remove it")
    if base.resolve() in out.absolute().resolve().parents:
        raise MergeError(f"out: {out} is inside the base's folder, which is never written; choose another place")


def _open(adapters: Sequence[str | Path | tuple[str | Path, float]]) -> list[WeightedPatch]:
    """The patches and their weights, opened.

    Raises:
        MergeError: none, one twice, or a weight that is no number. PatchError: one is damaged.
    """
    if not adapters:
        raise MergeError("no adapter to merge: name at least one patch folder")
    weighted: list[WeightedPatch] = []
    for adapter in adapters:
        path, weight = adapter if isinstance(adapter, tuple) else (adapter, 1.0)
        if not isinstance(weight, int | float) or not math.isfinite(weight):
            raise MergeError(f"{path}: the weight must be a finite number, got {weight!r}")
        patch = open_patch(path)
        if patch.digest in {one.patch.digest for one in weighted}:
            raise MergeError(f"{path}: named twice; to apply it with weight 2 write {path}:2")
        weighted.append(WeightedPatch(len(weighted), Path(path), patch, float(weight)))
    return weighted


def _write_shards(
    plan: MergePlan, staging: Staging, out: Path, *, check_base: bool, say: Callable[[str], None]
) -> Lines:
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
                done = write_shard(part, plan.files[name], pieces, check_base=check_base)
                if finishing is not None:
                    finishing.result()
                finishing = disk.submit(staging.finish, part, name, done)
            say(f"{number}/{len(plan.shards)}  {name}  {before}{len(done)} updates merged")
            lines += done
        if finishing is not None:
            finishing.result()
    return lines


def _check_ledger(plan: MergePlan, shapes: BaseShapes, weighted: Sequence[WeightedPatch], lines: Lines) -> None:
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
        for place in (*one.patch.layers, *one.patch.whole_shapes, *one.patch.token_rows):
            if (one.number, place) not in places and place not in shared:
                raise MergeError(f"{one.folder}: {place} was not merged")
    if plan.vocabulary is None and not any(line["changed"] for line in lines):
        raise MergeError(
            "nothing would change: every update is zero, cancels, or is lost in rounding to the stored dtype"
        )


def _check_space(plan: MergePlan, staging: Staging, out: Path) -> None:
    done = sum(path.stat().st_size for path in staging.model.iterdir())
    needed, free = plan.num_bytes - done, shutil.disk_usage(staging.folder).free
    if free < needed * 1.02:
        raise TemporaryFailure(f"{out}: {needed} bytes are needed, {free} are free; free some space and run again")


def _inputs(files: BaseFiles, weighted: Sequence[WeightedPatch], settings: list[Any]) -> str:
    """A digest of everything the merge is made from, so that only the same one is taken up again."""
    base = {path.name: file_signature(path) for path in sorted(files.folder.iterdir()) if path.is_file()}
    patches = [
        (one.patch.digest, one.patch.config.raw, one.weight, file_signature(one.folder / TENSOR_FILE))
        for one in weighted
    ]
    everything = [VERSION, str(files.folder.resolve()), base, patches, settings]
    return hashlib.sha256(json.dumps(everything).encode()).hexdigest()
