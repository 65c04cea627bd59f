"""Extract a patch from two full models: for every linear layer, the nearest low-rank matrix to its change.

Every difference between the models is in the patch, up to the reported energy, or is named in an error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from lorakit.base.find import find_base
from lorakit.base.transformers_io import load_skeleton
from lorakit.derive.combine import say_worst
from lorakit.errors import BaseModelError, MergeError, PatchError, check_absent
from lorakit.files.base_files import BaseFiles, open_base_files
from lorakit.files.text import Say, first_of, flatten
from lorakit.lora.layer_kinds import fan_in_fan_out, trainable_kind
from lorakit.lora.low_rank import LowRankFit, nearest_low_rank, relative_error
from lorakit.ops.stored_names import stored_name
from lorakit.patch import BaseShapes, Patch, new_patch, write_new_patch
from lorakit.patch.fingerprint import NOT_IDENTITY, BaseIdentity, fingerprint
from lorakit.patch.patch import FLOATS, MAX_RANK, low_rank_layer
from lorakit.version import VERSION

SHOWN: Final = 5
NO_LOGITS: Final = ("_token_id", "dropout", "dropout_prob", "_pdrop")
"""suffixes of config keys that do not affect logits outside training"""


@dataclass(frozen=True)
class Models:
    """Two models with equal shapes, tensor by tensor."""

    base: BaseFiles
    tuned: BaseFiles
    skeleton: nn.Module
    shapes: BaseShapes
    stored: Mapping[str, tuple[str, str]]
    """parameter, or stored tensor that is not a parameter -> its stored names in base and tuned"""

    def read(self, name: str) -> tuple[Tensor, Tensor]:
        """Read one tensor from base and tuned. Raises BaseModelError if it is not finite."""
        one, two = self.stored[name]
        before = self.base.shard_of[one].read(one)
        after = self.tuned.shard_of[two].read(two)
        for files, tensor in ((self.base, before), (self.tuned, after)):
            if not torch.isfinite(tensor).all():
                raise BaseModelError(f"{files.folder}: {name} holds values that are not finite")
        return before, after


def extract(
    base: str | Path,
    tuned: str | Path,
    *,
    rank: int,
    out: str | Path,
    revision: str | None = None,
    rest: Literal["refuse", "save"] = "refuse",
    say: Say = lambda text: None,
) -> Path:
    """Write the difference between ``tuned`` and ``base`` as a patch on ``base``; returns ``out``.

    For every Linear, Conv1D and Embedding whose weight differs: D = W_tuned - W_base (out, in) in float64, and the
    nearest B A of ``rank`` (``lora.low_rank.nearest_low_rank``), alpha = rank, so s = 1. The retained energy,
    1 - ||D - B A||^2 / ||D||^2 with A and B as stored, is printed and stored in the patch, by layer and in total.
    Models are folders, hub ids or builtin:tiny; ``revision`` is the base's.

    ``rest``: ``refuse`` raises if anything else differs (norms, biases); ``save`` writes those as full tensors,
    exactly. An embedding tied to the head belongs to this rest: a low-rank change of both cannot be checked against a
    base that stores the tensor once.

    Raises BaseModelError: the models differ in architecture or shapes, or a tensor is missing, quantised or not finite.
    PatchError: a difference cannot be stored in the patch, or there is none. MergeError: ``out`` exists, or the rank is
    impossible. Nothing is written then.
    """
    if rest not in ("refuse", "save"):
        raise MergeError(f"rest: 'refuse' or 'save', got {rest!r}")
    check_absent(out, "out", MergeError)
    models = _open(find_base(str(base), revision), find_base(str(tuned)), say)
    # no update for tied modules, nor for an embedding whose own forward may not read W + B A
    known = {name for name, module in models.skeleton.named_modules() if trainable_kind(module) is not None}
    known -= {*(models.shapes.tied or ())}
    updated = [name for name in models.shapes.layers if name in known and f"{name}.weight" in models.stored]
    most = min(MAX_RANK, max((min(models.shapes.layers[name][1]) for name in updated), default=0))
    if not 1 <= rank <= most:
        raise MergeError(f"rank: from 1 to {most}, the smaller side of the largest layer, got {rank}")
    weights = {f"{name}.weight" for name in updated}
    others = [name for name in models.stored if name not in weights and not _same(*models.read(name))]
    if lost := next((name for name in others if name not in models.shapes.parameters or "." not in name), None):
        raise PatchError(f"{lost} differs, and a patch cannot hold it: no layer has a parameter of that name")
    if others and rest == "refuse":
        what = f"{len(others)} tensors that get no low-rank update: {first_of(others, SHOWN)}"
        raise PatchError(f"{tuned} differs from {base} in {what}. Say --rest save (rest='save') to save them in full")
    full_tensors = _full_tensors(models, others)
    fits: dict[str, LowRankFit] = {}
    for name in updated:
        before, after = models.read(f"{name}.weight")
        if not _same(before, after):
            D = after.double() - before.double()
            fits[name] = nearest_low_rank(models.shapes.layers[name][0].matrix(D), rank)
    if not fits:
        raise PatchError(f"no linear layer of {tuned} differs from {base}: there is no patch to extract")
    energy, unchanged = 1 - relative_error(*fits.values()) ** 2, len(updated) - len(fits)
    say(f"{len(fits)} layers changed, {unchanged} unchanged; energy kept {energy:.6f}")
    say_worst(fits, say)
    extracted = {
        "tuned": str(tuned), "rank": rank, "energy": energy,
        "energies": {name: 1 - relative_error(one) ** 2 for name, one in fits.items()},
        "unchanged": unchanged, "whole": sorted(full_tensors),
    }  # fmt: skip
    origin = fingerprint(BaseIdentity(models.base), fits)
    facts = {"lorakit": VERSION, "base": origin, "extracted": extracted, "adapter": {"energy kept": energy}}
    return write_new_patch(out, _patch(models, fits, facts, str(base), revision, full_tensors))


def _open(base: Path, tuned: Path, say: Say) -> Models:
    """Open both models, which must differ in values alone."""
    skeleton = load_skeleton(base)
    other = load_skeleton(tuned)
    if type(skeleton) is not type(other):
        raise BaseModelError(f"{base} is a {type(skeleton).__name__}, {tuned} a {type(other).__name__}")
    a, b = (flatten(model.config.to_dict()) for model in (skeleton, other))  # type: ignore[operator, union-attr]
    differing = (key for key in {*a, *b} if a.get(key) != b.get(key))
    for key in sorted(key for key in differing if key.rpartition(".")[2] not in NOT_IDENTITY):
        text = f"config.json: {key} is {a.get(key)!r} in {base}, {b.get(key)!r} in {tuned}"
        if not key.endswith(NO_LOGITS):
            raise BaseModelError(f"{text}; a patch holds tensors alone, so the two must be one architecture")
        say(f"{text}; a patch does not hold it")
    files = (open_base_files(base), open_base_files(tuned))
    if BaseIdentity(files[0]).tokenizer != BaseIdentity(files[1]).tokenizer:
        say(f"the tokenizers of {base} and {tuned} differ; a patch does not hold one")
    shapes = BaseShapes.of(skeleton)
    return Models(*files, skeleton, shapes, _pair(*files, shapes))


def _pair(base: BaseFiles, tuned: BaseFiles, shapes: BaseShapes) -> dict[str, tuple[str, str]]:
    """Pair the stored tensors of both models by parameter; BaseModelError lists those that do not agree."""
    ours = _names(base, shapes)
    theirs = _names(tuned, shapes)
    problems = [f"{name} is missing in {tuned.folder}" for name in ours if name not in theirs]
    problems += [f"{name} is missing in {base.folder}" for name in theirs if name not in ours]
    stored = {name: (own, theirs[name]) for name, own in ours.items() if name in theirs}
    for name, (one, two) in stored.items():
        a = base.entry(one)
        b = tuned.entry(two)
        if a.shape != b.shape:
            problems.append(f"{name} is {a.shape} in {base.folder}, {b.shape} in {tuned.folder}")
        elif name in shapes.parameters and (a.shape != shapes.parameters[name] or not {a.dtype, b.dtype} <= {*FLOATS}):
            problems.append(f"{name} is stored as {a.shape} {a.dtype} and {b.dtype}: quantised")
    if problems:
        shown = first_of(problems, SHOWN, "; ")
        raise BaseModelError(f"{base.folder} and {tuned.folder} differ in more than values: {shown}")
    return stored


def _names(files: BaseFiles, shapes: BaseShapes) -> dict[str, str]:
    """Return parameter -> stored name, without a tied head. A stored tensor that is no parameter has its own name."""
    # without what has no tensor of its own: a tied head, experts stored one by one
    names = {name: stored for name in shapes.parameters if (stored := stored_name(files, name)) is not None}
    claimed = set(names.values())
    names |= {name: name for name in files.shard_of if name not in claimed}
    head = names.pop(f"{shapes.tied[0]}.weight", None) if shapes.tied else None
    if shapes.tied and head:
        own = names.setdefault(f"{shapes.tied[1]}.weight", head)
        if not torch.equal(files.shard_of[head].read(head), files.shard_of[own].read(own)):
            raise BaseModelError(f"{files.folder}: {head} and {own} are one tensor by its config, and differ")
    return names


def _same(one: Tensor, two: Tensor) -> bool:
    return torch.equal(one, two) if one.dtype == two.dtype else torch.equal(one.double(), two.double())


def _full_tensors(models: Models, others: Sequence[str]) -> dict[str, Tensor]:
    """Return full tensors: biases of linear layers alone, others with all of their module, as PEFT reads them."""
    shapes = models.shapes
    biases = []
    modules = set[str]()
    for name in others:
        module, _, key = name.rpartition(".")
        if key == "bias" and module in shapes.layers:
            biases.append(name)
        else:
            modules |= set(shapes.tied) if shapes.tied and module == shapes.tied[1] else {module}
    names = [*biases, *(name for name in shapes.parameters if name.rpartition(".")[0] in modules)]
    head = {f"{shapes.tied[0]}.weight": f"{shapes.tied[1]}.weight"} if shapes.tied else {}
    return {name: models.read(head.get(name, name))[1] for name in dict.fromkeys(names)}


def _patch(
    models: Models,
    fits: Mapping[str, LowRankFit],
    facts: Mapping[str, Any],
    base: str,
    revision: str | None,
    full_tensors: Mapping[str, Tensor],
) -> Patch:
    kinds = {name: models.shapes.layers[name][0] for name in fits}
    return new_patch(
        {name: low_rank_layer(one, embedding=kinds[name].takes_ids) for name, one in fits.items()},
        metadata=facts,
        base_model=base,
        revision=revision,
        full_tensors=full_tensors,
        all_modules=[name for name, _ in models.skeleton.named_modules()],
        task_type="CAUSAL_LM" if type(models.skeleton).__name__.endswith("ForCausalLM") else None,
        fan_in_fan_out=fan_in_fan_out(kinds.values()),
        tied=models.shapes.tied is not None and f"{models.shapes.tied[0]}.weight" in full_tensors,
    )
