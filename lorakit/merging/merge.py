"""Merge patches into a base: plan, write file by file, check that every part was applied, rename into place.

The base is never written, and the merged folder appears only when it is complete.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lorakit.base.find import find_base
from lorakit.base.meta import check_stored_tensors
from lorakit.base.model_class import skeleton_for
from lorakit.base.quantized import linear_layers
from lorakit.errors import BaseModelError, MergeError, TemporaryFailure
from lorakit.files.atomic import digest, file_signature, write_json
from lorakit.files.base_files import MERGE_LEDGER, BaseFiles, open_base_files
from lorakit.files.dtype_names import full_dtype_name
from lorakit.merging.folder import write_config_and_tokenizer
from lorakit.merging.onto import (
    DEQUANTIZED,
    REASONS,
    TrainedQuantization,
    choose_target,
    trained_quantization,
)
from lorakit.merging.plan import MergePlan, plan_merge, shared_names
from lorakit.merging.requantize import requantize_folder
from lorakit.merging.staging import Lines, Staging, staged
from lorakit.merging.verify import check_comparable, measure_error, verify_merge
from lorakit.merging.write import write_shard
from lorakit.patch import BaseIdentity, BaseShapes, check_base, unverified_note
from lorakit.patch.fingerprint import changed_prompting, compared_by, full_digests
from lorakit.patch.patch import TENSOR_FILE
from lorakit.patch.prompting import common_form, own_template, trained_form
from lorakit.patch.weighted import WeightedPatch, open_weighted
from lorakit.version import VERSION


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
    allow_edited_config: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write the base with the patches merged in as a normal model folder; returns ``out``.

    Each changed tensor is the float64 sum rounded once. All others are copied byte for byte, or converted if ``dtype``
    is given. An adapter may be given as (folder, weight). ``out`` appears when it is complete; after an interruption
    the same call resumes after the last finished file. ``out/merge.json`` lists every change.

    ``untie``: write a head of its own where a patch changes one of two tensors that share their values.
    ``onto``: for a patch that was trained on a quantised base, the weights it is added to: ``dequantized``, those used
    in training (the default: only their rounding is lost), or ``original``, those before quantisation.
    ``requantize``: quantise the result. ``measure``: report the error of the result on a few prompts, against the
    quantised base + adapters as in training.
    ``verify``: run prompts through base + adapters and through the result, and fail where they differ by more than
    rounding explains.

    Raises:
        MergeError: ``out`` exists, or a layer cannot be merged; nothing is left. PatchError: a patch is damaged or of
        another base. TemporaryFailure: the disk is full; finished files remain for the next call.
    """
    dtype = full_dtype_name(dtype)
    out, folder = Path(out), find_base(str(base), revision)
    _check_out(out, folder)
    weighted = _open(adapters, allow_edited_config=allow_edited_config)
    files, skeleton = open_base_files(folder), skeleton_for(folder, [one.patch for one in weighted])
    shapes, linear = BaseShapes.of(skeleton), list(linear_layers(skeleton))
    quantization = trained_quantization(files, [one.patch for one in weighted], onto)
    onto = choose_target(files, quantization, onto)
    _check_options(onto, quantization, dtype, requantize=requantize, verify=verify)
    dequantize = quantization if onto == DEQUANTIZED else None
    plan = plan_merge(files, shapes, weighted, quantization=dequantize, dtype=dtype, untie=untie)
    if onto is not None:
        say(f"onto       {onto}: {REASONS[onto]}" + ("; then quantised" if requantize else ""))
    _check_verifiable(folder, plan, weighted, verify=verify)
    identity = BaseIdentity(files, template=_common_template(weighted))
    _check_bases(weighted, identity, base, say, full=onto == DEQUANTIZED, mismatch=allow_base_mismatch)
    settings = [dtype, untie, allow_base_mismatch, onto, requantize]
    inputs = _inputs(files, weighted, settings)
    with staged(out, inputs) as staging:
        lines = _write_shards(plan, staging, out, check_base=not allow_base_mismatch, say=say)
        _check_ledger(plan, shapes, weighted, lines)
        write_config_and_tokenizer(files, plan, staging.model, identity.template)
        if quantization is not None and requantize:
            requantize_folder(staging.model, quantization, linear)
        ledger: dict[str, Any] = {
            "lorakit": VERSION, "base": str(base), "revision": revision, "allow_base_mismatch": allow_base_mismatch,
            "dtype": dtype, "untied": plan.untied, "onto": onto, "requantized": requantize, "merged": lines,
            "adapters": _adapter_lines(weighted), "prompting": _prompting(weighted, say),
        }  # fmt: skip
        if quantization is not None:
            ledger["error"] = _measured(folder, weighted, staging.model, plan, quantization, say) if measure else None
        if verify:
            ledger["verified"] = verify_merge(folder, weighted, staging.model, lines, say)
        write_json(staging.model / MERGE_LEDGER, ledger)
        if _inputs(files, weighted, settings) != inputs:
            raise MergeError(f"{folder} or a patch changed while it was merged; nothing was written. Merge again")
        staging.commit()
    return out


def _check_options(
    onto: str | None, quantization: TrainedQuantization | None, dtype: str | None, *, requantize: bool, verify: bool
) -> None:
    if requantize and quantization is None:
        raise MergeError("requantize: no patch was trained on a quantised base; merge without --requantize")
    if requantize and dtype is not None:
        raise MergeError("requantize: quantised weights have their own dtype; leave --dtype out")
    if verify and onto == DEQUANTIZED:
        raise MergeError(
            "verify: compares with the base in floats; a merge onto dequantized weights measures its error instead"
        )
    if verify and requantize:
        raise MergeError("verify: quantisation loses more than rounding; its error is measured instead")


def _check_verifiable(folder: Path, plan: MergePlan, weighted: Sequence[WeightedPatch], *, verify: bool) -> None:
    if verify and plan.vocabulary is not None and not plan.vocabulary.new_tokens:
        raise MergeError(
            f"verify: {weighted[0].folder} changes the vocabulary to {plan.vocabulary.vocabulary_size} tokens, which"
            " the base cannot run beside; leave --verify out"
        )
    if verify:
        check_comparable(weighted)
        try:
            check_stored_tensors(folder)
        except BaseModelError as problem:
            raise MergeError(f"verify: compares the answers of a causal language model: {problem}") from None


def _adapter_lines(weighted: Sequence[WeightedPatch]) -> list[dict[str, Any]]:
    """Return the ledger's lines of the patches."""
    return [
        {
            "path": str(one.folder), "weight": one.weight, "sha256": digest(one.folder / TENSOR_FILE),
            "base_compared_by": compared_by(one.patch),
        }
        for one in weighted
    ]  # fmt: skip


def _common_template(weighted: Sequence[WeightedPatch]) -> str | None:
    """Return the chat template that all patches bring with them; None if they bring none, or others."""
    templates = {own_template(one.patch.metadata) for one in weighted}
    return templates.pop() if len(templates) == 1 else None


def _prompting(weighted: Sequence[WeightedPatch], say: Callable[[str], None]) -> dict[str, Any] | None:
    """Return the form of prompts that all patches were trained on, and report it unless it is a chat without a system.

    None if the patches differ in it.
    """
    form = common_form(trained_form(one.patch.metadata) for one in weighted)
    if form is None:
        say(
            "note: the patches were trained on rows of different forms; prompts of the merged model go through its"
            " chat template"
        )
        return None
    if form.raw:
        say("note: the rows were plain text; prompt the merged model without its chat template, as lorakit does")
    elif form.system is not None:
        say(f"note: all rows began with a system prompt; begin prompts with it, as lorakit does: {form.system!r}")
    return asdict(form)


def _check_bases(
    weighted: Sequence[WeightedPatch],
    identity: BaseIdentity,
    base: str | Path,
    say: Callable[[str], None],
    *,
    full: bool,
    mismatch: bool,
) -> None:
    """Check that the patches were trained on this base, and report those that hold no digests.

    ``full``: compare every value now, because the merge reads dequantised values and cannot compare them.
    """
    for one in weighted:
        if not mismatch:
            check_base(
                one.patch, identity, full=full and full_digests(one.patch) is not None, allow_template_change=True
            )
        if changed := changed_prompting(one.patch, identity):
            say(f"note: {one.folder} was trained with another {changed}; the merged model has that of {base}")
        if (note := unverified_note(one.patch, base)) is not None:
            say(note)


def _measured(
    base: Path,
    weighted: Sequence[WeightedPatch],
    merged: Path,
    plan: MergePlan,
    quantization: TrainedQuantization,
    say: Callable[[str], None],
) -> dict[str, Any] | None:
    """Measure the error against the trained forward pass; None where base and adapters cannot be run together."""
    experts = any(layer.num_experts for one in weighted for layer in one.patch.layers.values())
    if experts or plan.vocabulary is not None:
        say(f"error      not measured: {'experts are changed' if experts else 'the vocabulary changes'}")
        return None
    return measure_error(base, weighted, merged, quantization, say)


def _check_out(out: Path, base: Path) -> None:
    if os.path.lexists(out):
        raise MergeError(f"out: {out} exists already; choose another folder, or remove it")
    if base.resolve() in out.absolute().resolve().parents:
        raise MergeError(f"out: {out} is inside the base's folder, which is never written; choose another folder")


def _open(
    adapters: Sequence[str | Path | tuple[str | Path, float]], *, allow_edited_config: bool
) -> list[WeightedPatch]:
    """Open the patches.

    Raises:
        MergeError: no patch, one patch twice, or a weight that is not finite. PatchError: a patch is damaged.
    """
    if not adapters:
        raise MergeError("no adapter to merge: name at least one patch folder")
    weighted = open_weighted(adapters, allow_edited_config=allow_edited_config)
    for one in weighted:
        if one.patch.digest in {other.patch.digest for other in weighted[: one.index]}:
            raise MergeError(f"{one.folder}: named twice; to apply it with weight 2 write {one.folder}:2")
    return weighted


def _write_shards(
    plan: MergePlan, staging: Staging, out: Path, *, check_base: bool, say: Callable[[str], None]
) -> Lines:
    """Write every file of the model; returns the ledger's lines. One file is synced while the next is computed."""
    lines: Lines = []
    _check_space(plan, staging, out)
    with ThreadPoolExecutor(1) as disk:
        finishing: Future[None] | None = None
        for number, (name, tensors) in enumerate(plan.shards.items(), 1):
            done = staging.finished(name)
            before = "" if done is None else "finished before, "
            if done is None:
                part = staging.folder / f"{name}.part"
                done = write_shard(part, plan.files[name], tensors, check_base=check_base)
                if finishing is not None:
                    finishing.result()
                finishing = disk.submit(staging.finish, part, name, done)
            say(f"{number}/{len(plan.shards)}  {name}  {before}{len(done)} updates merged")
            lines += done
        if finishing is not None:
            finishing.result()
    return lines


def _check_ledger(plan: MergePlan, shapes: BaseShapes, weighted: Sequence[WeightedPatch], lines: Lines) -> None:
    """Check that every part of every patch was applied exactly once, and that some value changed.

    Raises:
        MergeError: names the part that is missing or was applied twice.
    """
    applied = [(line["patch"], line.get("layer") or line["parameter"], line["tensor"]) for line in lines]
    planned = [
        (part.source.index, part.name, tensor.name)
        for tensor in plan.tensors()
        for part in (*tensor.full_tensors, *tensor.updates)
    ]
    if sorted(applied) != sorted(planned):
        raise MergeError(f"not applied exactly once: {sorted(set(planned) ^ set(applied))[:3]}")
    merged = {(index, name) for index, name, _ in applied}
    for one in weighted:
        shared = set() if plan.untied else shared_names(shapes, one.patch)
        for name in (*one.patch.layers, *one.patch.full_shapes, *one.patch.token_rows):
            if (one.index, name) not in merged and name not in shared:
                raise MergeError(f"{one.folder}: {name} was not merged")
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
    """Return a digest of everything that the merge depends on; only a merge with the same digest is resumed."""
    base = {path.name: file_signature(path) for path in sorted(files.folder.iterdir()) if path.is_file()}
    patches = [
        (one.patch.digest, one.patch.config.raw, one.weight, file_signature(one.folder / TENSOR_FILE))
        for one in weighted
    ]
    inputs = [VERSION, str(files.folder.resolve()), base, patches, settings]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()
