"""Merge patches into a base: plan, write file by file, check that every part was applied, rename into place.

The base is never written, and the merged folder appears only when it is complete.
"""

import shutil
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from lorakit.base.find import find_base, find_tokenizer
from lorakit.base.meta import check_stored_tensors
from lorakit.base.transformers_io import load_skeleton
from lorakit.errors import BaseModelError, MergeError, TemporaryFailure, check_absent, translate_error
from lorakit.files.atomic import MERGE_LEDGER, atomic_folder, digest, fast_digest, file_signature, write_json
from lorakit.files.base_files import BaseFiles, open_base_files
from lorakit.files.safetensors import dtype_name
from lorakit.files.text import Say, full_dtype_name
from lorakit.merging.folder import write_config_and_tokenizer, write_end_tokens
from lorakit.merging.plan import MergePlan, plan_merge, skeleton_for
from lorakit.merging.tensors import DEQUANTIZED, REASONS, trained_quantization
from lorakit.merging.verify import incomparable_layers, verify_merge
from lorakit.merging.write import write_shard
from lorakit.patch import BaseIdentity, BaseShapes, Patch, check_base, unverified_note
from lorakit.patch.find import WeightedPatch, open_weighted
from lorakit.patch.own_head import has_own_head
from lorakit.patch.patch import TENSOR_FILE
from lorakit.patch.prompting import chat_template_digest, common_template, trained_form
from lorakit.patch.same_base import Allow, changed_prompting, check_tokenizer_beside
from lorakit.quant.files import quantization_config
from lorakit.version import VERSION

SAID_LOSS: Final = 0.01  # share of the change of one tensor, lost in rounding, from which it is said
Lines = list[dict[str, Any]]  # of the ledger: one for every part of a patch in every tensor


def merge(
    base: str | Path,
    *adapters: str | Path | tuple[str | Path, float],
    out: str | Path,
    revision: str | None = None,
    dtype: str | None = None,
    untie: bool = False,
    verify: bool = False,
    onto: str | None = None,
    tokenizer: str | Path | None = None,
    allow: Collection[Allow] = (),
    say: Say = lambda text: None,
) -> Path:
    """Write the base with the patches merged in, or a quantised one in plain floats, as a model; returns ``out``.

    Each changed tensor is the float64 sum rounded once. All others are copied byte for byte, or converted if ``dtype``
    is given. An adapter may be given as (folder, weight). ``out`` appears complete; its merge.json lists every change.

    ``untie``: write a head of its own where a patch changes one of two tensors that share their values.
    ``onto``: for a patch that was trained on a quantised base, the weights it is added to: ``dequantized``, those used
    in training (the default: only their rounding is lost), or ``original``, those before quantisation.
    ``verify``: run base + adapters, and fail where a merged layer's output differs by more than rounding explains.
    ``tokenizer``: folder of the merged model's tokenizer and chat template, if they are not the base's own.
    ``allow``: ``base`` accepts another base than the patches were trained on.

    Raises MergeError: ``out`` exists, or a layer cannot be merged. PatchError: a patch is damaged or of another base.
    TemporaryFailure: the disk is full. Nothing is left then.
    """
    dtype = full_dtype_name(dtype)
    folder = find_base(str(base), revision)
    _check_out(out := Path(out), folder)
    opened = _open(adapters, folder, verify=verify, untie=untie)
    files = open_base_files(folder)
    skeleton, shapes, named = skeleton_for(folder, [one.patch for one in opened])
    weighted = [replace(one, patch=patch) for one, patch in zip(opened, named, strict=True)]
    quantization = trained_quantization(files, named, onto)
    onto = onto if quantization is None else DEQUANTIZED
    plan = plan_merge(files, shapes, weighted, quantization=quantization, dtype=dtype, untie=untie)
    if weighted and onto is not None:
        say(f"onto       {onto}: {REASONS[onto]}")
    if verify:
        _check_verifiable(folder, plan, weighted, shapes, onto)
    own = (plan.vocabulary and plan.vocabulary.tokenizer) or folder
    words = find_tokenizer(None if tokenizer is None else str(tokenizer), own)
    template = common_template(patch.metadata for patch in named)
    identity = BaseIdentity(files, words, template)
    for one in opened:
        _check_trained_on(one.patch, identity, base, say, full=onto == DEQUANTIZED, allow=allow)
    inputs = _inputs(files, weighted)
    try:
        with atomic_folder(out) as model:
            lines = _write_shards(plan, files, model, out, check_base="base" not in allow, say=say)
            if weighted and plan.vocabulary is None and not any(line["changed"] for line in lines):
                raise MergeError("nothing would change: every update is zero, cancels, or is lost in rounding")
            write_config_and_tokenizer(files, plan, model, words, template, shapes.architecture)
            ends = write_end_tokens(folder, model, weighted, say) if skeleton.can_generate() else None  # type: ignore[operator]
            ledger: dict[str, Any] = {
                "lorakit": VERSION, "base": str(base), "revision": revision, "allow": sorted(allow), "dtype": dtype,
                "untied": plan.untied, "onto": onto, "merged": lines, "end_tokens": ends,
                "adapters": [_adapter_line(one, base) for one in weighted],
                "files": {name: fast_digest(model / name) for name in plan.shards},
                "prompting": _prompting(weighted, template, folder, say), "rounding": _rounding(plan, lines, say),
            }  # fmt: skip
            if verify:
                ledger["verified"] = verify_merge(folder, weighted, model, lines, say, quantization)
            write_json(model / MERGE_LEDGER, ledger)
            if _inputs(files, weighted) != inputs:
                raise MergeError(f"{folder} or a patch changed while it was merged; nothing was written. Merge again")
    except FileExistsError:  # another merge was faster
        raise MergeError(f"out: {out} exists already; choose another name, or remove it") from None
    return out


def _check_verifiable(
    folder: Path, plan: MergePlan, weighted: Sequence[WeightedPatch], shapes: BaseShapes, onto: str | None
) -> None:
    """Raise MergeError unless base and patches can be run beside the merged model."""
    if plan.head is not None:
        raise MergeError("verify: compares answers, and this adapter's head gives none; leave --verify out")
    if plan.vocabulary is not None and not plan.vocabulary.new_tokens:
        raise MergeError("verify: a patch changes the vocabulary, beside which the base cannot run; leave --verify out")
    reasons = incomparable_layers(weighted, shapes)
    if None not in reasons.values():
        first = f"{min(reasons)}: {reasons[min(reasons)]}"
        raise MergeError(f"verify: no layer could be compared of those that are changed ({first}); leave --verify out")
    if onto == DEQUANTIZED and any(layer.num_experts for one in weighted for layer in one.patch.layers.values()):
        raise MergeError("verify: experts are changed, which a quantised base cannot run; leave --verify out")
    with translate_error(BaseModelError, MergeError, "verify: compares the answers of a causal language model"):
        check_stored_tensors(folder)
    loaded = type(load_skeleton(folder)).__name__
    if shapes.architecture != loaded:
        raise MergeError(f"verify: runs {loaded}, and the patch is of {shapes.architecture}; leave --verify out")


def _rounding(plan: MergePlan, lines: Lines, say: Say) -> dict[str, Any] | None:
    """Return the share of the changes that rounding to 16 bits loses, and say it; None if none is rounded so."""
    dtypes = {tensor.name: tensor.dtype for tensor in plan.tensors() if tensor.dtype.itemsize == 2}
    lost = {line["tensor"]: line["lost_to_rounding"] for line in lines if line["tensor"] in dtypes}
    lost = {name: share for name, share in lost.items() if share}
    if not lost:
        return None
    names = " and ".join(sorted({dtype_name(dtypes[name]) for name in lost}))
    middle = median(lost.values())
    worst = max(lost, key=lambda name: lost[name])
    if lost[worst] >= SAID_LOSS:
        shares = f"{middle:.1%} of the change (median of {len(lost)} tensors; most {lost[worst]:.1%}: {worst})"
        say(f"rounding   to {names} loses {shares}; --dtype float32 keeps it")
    return {"dtype": names, "tensors": len(lost), "median": middle, "most": lost[worst], "tensor": worst}


def _adapter_line(one: WeightedPatch, base: str | Path) -> dict[str, Any]:
    """Return the ledger's line of a patch."""
    return {
        "path": str(one.folder), "weight": one.weight, "sha256": digest(one.folder / TENSOR_FILE),
        "unverified": unverified_note(one.patch, base),
    }  # fmt: skip


def _prompting(weighted: Sequence[WeightedPatch], template: str | None, base: Path, say: Say) -> dict[str, Any] | None:
    """Return the form of prompts of all patches, reported unless it is a plain chat; None if they differ."""
    if not weighted or has_own_head(weighted[0].patch):  # which answers no prompts
        return None
    has_template = template is not None or chat_template_digest(base) is not None  # else all is plain text
    form, *others = [trained_form(one.patch.metadata) for one in weighted]
    if any(other != form for other in others):
        if has_template:
            say("note: the patches were trained on rows of different forms; the merged model uses its chat template")
        return None
    for note in form.notes() if has_template else ():
        say(f"note: the merged model is prompted as its patches: {note}")
    return asdict(form)


def _check_trained_on(
    patch: Patch, identity: BaseIdentity, base: str | Path, say: Say, *, full: bool, allow: Collection[Allow]
) -> None:
    """Raise PatchError unless this is the patch's base. ``full``: by every value, as floats are while they are read."""
    check_base(patch, identity, full=full, allow={*allow, "template"})
    if "template" not in allow:
        check_tokenizer_beside(patch, identity)
    if changed := changed_prompting(patch, identity):
        say(f"note: {patch.folder} was trained with another {changed}; the merged model has that of {base}")
    if (note := unverified_note(patch, base)) is not None:
        say(note)


def _check_out(out: Path, base: Path) -> None:
    check_absent(out, "out", MergeError)
    if base.resolve() in out.absolute().resolve().parents:
        raise MergeError(f"out: {out} is inside the base's folder, which is never written; choose another folder")


def _open(
    adapters: Sequence[str | Path | tuple[str | Path, float]], base: Path, *, verify: bool, untie: bool
) -> list[WeightedPatch]:
    """Open the patches, each of them once; none of a base that is quantised."""
    if not adapters and quantization_config(base) is None:
        raise MergeError("no adapter to merge: name at least one patch folder")
    if not adapters and (verify or untie):
        raise MergeError(f"{'verify' if verify else 'untie'}: there is no adapter, and without one nothing is changed")
    weighted = open_weighted(adapters)
    for one in weighted:
        if one.patch.digest in {other.patch.digest for other in weighted[: one.index]}:
            raise MergeError(f"{one.folder}: named twice; to apply it with weight 2 write {one.folder}:2")
    return weighted


def _write_shards(plan: MergePlan, files: BaseFiles, model: Path, out: Path, *, check_base: bool, say: Say) -> Lines:
    """Write every file of the model; returns the ledger's lines."""
    lines: Lines = []
    free = shutil.disk_usage(model).free
    if free < plan.num_bytes * 1.02:
        raise TemporaryFailure(f"{out}: {plan.num_bytes} bytes are needed, {free} are free; free some and run again")
    for number, file in enumerate(files.shards, 1):
        name = file.path.name
        done = write_shard(model / name, file, plan.shards[name], check_base=check_base)
        say(f"{number}/{len(plan.shards)}  {name}  {len(done)} updates merged")
        lines += done
    return lines


def _inputs(files: BaseFiles, weighted: Sequence[WeightedPatch]) -> dict[Path, list[int] | None]:
    """Return numbers that change with every file that the merge reads."""
    paths = [*files.folder.iterdir(), *(one.folder / TENSOR_FILE for one in weighted)]
    return {path: file_signature(path) for path in paths if path.is_file()}
