"""Start a run from a patch: its settings are the adapter's, its tensors the adapter's first values."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lorakit.base.find import find_base, find_tokenizer
from lorakit.base.from_recipe import adapter_spec, recipe_template
from lorakit.base.transformers_io import load_skeleton
from lorakit.errors import PatchError, RecipeError
from lorakit.files.base_files import BaseFiles, open_base_files
from lorakit.lora import attach
from lorakit.lora.inject import checkpoint_tensors
from lorakit.lora.methods import saved_as
from lorakit.lora.targets import tied_head
from lorakit.ops.stored_names import tensor_name
from lorakit.patch import BaseIdentity, BaseShapes, Patch, check_base, check_fits, open_patch, read_patch
from lorakit.patch.find import find_patch
from lorakit.patch.fit import in_encoder_names, with_head_names, without_copies
from lorakit.patch.model import FIXED, SELECTION, adapter_from_patch, patch_settings
from lorakit.patch.own_head import has_own_head, head_parts, own_head, without_own_head
from lorakit.patch.same_base import RefusedBaseError
from lorakit.recipe import AdapterSection, Recipe
from lorakit.run.record import START_OVER, recorded_run


@contextmanager
def naming_key(key: str) -> Iterator[None]:
    """Name a recipe's key in errors of its patch. An option that a message names is none of a recipe's."""
    try:
        yield
    except PatchError as problem:
        text = problem.problem if isinstance(problem, RefusedBaseError) else problem
        raise PatchError(f"{key}: {text}") from None


@dataclass(frozen=True)
class Start:
    """The patch that a run starts from."""

    folder: str
    digest: str  # of its tensors and settings (`Patch.identity`)
    settings: Mapping[str, Any]  # keys of the recipe's `adapter` section that are taken from it
    step: int | None = None  # of the run that trained it; None if it is not recorded

    def facts(self) -> dict[str, Any]:
        """Return what records and patches say of it: its folder's name, and no path."""
        step = {} if self.step is None else {"step": self.step}
        return {"name": Path(self.folder).absolute().name, "digest": self.digest, **step}

    def __str__(self) -> str:
        step = "" if self.step is None else f" (step {self.step})"
        # `tied_head` matters to few bases
        shown = [key for key in FIXED if key != "tied_head" and self.settings.get(key) not in (None, (), {}, "none")]
        return f"{self.folder}{step}" + (f", with its {', '.join(shown)}" if shown else "")

    def apply(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the patch's settings."""
        return recipe.model_copy(update={"adapter": recipe.adapter.model_copy(update=dict(self.settings))})


@naming_key("adapter.start_from")
def find_start(recipe: Recipe) -> Start | None:
    """Return the start of a recipe; None without one. Raises RecipeError: its own settings differ; PatchError."""
    section = recipe.adapter
    if section.start_from is None:
        return None
    if Path(recipe.output).resolve() in (folder := Path(section.start_from).resolve(), *folder.parents):
        remedy = "choose another output, or to go on with that run, leave start_from out and raise train.steps"
        raise RecipeError(f"adapter.start_from: {section.start_from} is in this run's own output; {remedy}")
    patch = in_encoder_names(open_patch(find_patch(section.start_from)))
    fixed = patch_settings(patch)
    if has_own_head(patch):  # which the objective decides
        fixed["modules_to_save"] = tuple(one for one in fixed["modules_to_save"] if one not in head_parts(patch))
    _check_given(section, fixed, recipe.base.model)
    given = section.model_fields_set
    own = given if given.isdisjoint(SELECTION) else given | set(SELECTION)
    taken = {key: value for key, value in fixed.items() if key not in own}
    assert patch.identity is not None
    return Start(section.start_from, patch.identity, taken, patch.metadata.get("step"))


def choose_start(recipe: Recipe, *, fresh: bool) -> Start | None:
    """Return the patch that a run starts from, of its record if it goes on. Raises LorakitError, as `find_start`."""
    recorded = {} if fresh else recorded_run(Path(recipe.output))
    facts = recorded.get("start")
    section = recorded.get("recipe", {}).get("adapter", {})
    folder = recipe.adapter.start_from
    if facts and folder is not None and section.get("start_from") == folder:
        # of a record that `open_record` refuses with a full message
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            before = AdapterSection.model_validate_json(json.dumps(section))
            taken = {key: getattr(before, key) for key in FIXED if key not in recipe.adapter.model_fields_set}
            return Start(folder, facts["digest"], taken, facts.get("step"))
    return find_start(recipe)


def _check_given(section: AdapterSection, fixed: Mapping[str, Any], base: str) -> None:
    """Raise RecipeError, with both values and a remedy, unless given settings are the patch's, without the base."""
    given = section.model_fields_set
    folder = section.start_from
    problems = []
    for key in ("method", "rank", "alpha", "new_tokens"):  # the values of new tokens are in their order
        value = getattr(section, key)
        own = fixed.get(key, value)
        # the same tensors may be trained by another method
        if key not in given or value == own or (key == "method" and saved_as(value) == saved_as(own)):
            continue
        shown = [list(one) if isinstance(one, tuple) else one for one in (value, own)]
        remedy = "and it is taken from the patch"
        if key == "rank":
            commands = f"merge {base} {folder} --out FULL, then lorakit extract {base} FULL --rank {value} --out NEW"
            remedy = f"or make a patch of that rank and start from it: lorakit {commands}"
        both = f"{shown[0]}, and the patch {folder} has {shown[1]}"
        problems.append(f"adapter.{key}: {both}; leave the key out, {remedy}")
    if "init" in given:
        problems.append(f"adapter.init: {section.init}, but the values of A and B are those of {folder}; leave it out")
    if problems:
        raise RecipeError("\n".join(problems))


@naming_key("adapter.start_from")
def read_start(start: Start, recipe: Recipe) -> Patch:
    """Return a start's patch. Raises PatchError: it has changed, is of another base, or adapts other layers."""
    patch = read_patch(find_patch(start.folder))
    if patch.identity != start.digest:
        raise PatchError(f"{start.folder} has changed since this run began; put it back, or {START_OVER}")
    folder = find_base(recipe.base.model, recipe.base.revision)
    files = open_base_files(folder)
    tokenizer = find_tokenizer(recipe.base.tokenizer, folder)
    model = load_skeleton(folder)
    shapes = BaseShapes.of(model)
    patch = with_head_names(patch, shapes, model)
    check_fits(without_own_head(patch), shapes, recipe.base.model)
    head = own_head(patch)
    wanted = tuple(map(str, recipe.objective.labels or ())), recipe.objective.settings.get("problem_type")
    if head is not None and (head.labels, head.kind) != wanted:
        raise PatchError(f"{start.folder}: its labels are {head.labels, head.kind}, and the objective's {wanted}")
    check_base(patch, BaseIdentity(files, tokenizer, recipe_template(recipe)))
    spec = adapter_spec(recipe, folder)
    with torch.device("meta"):
        attach(model, spec, recipe.train.seed)
    try:
        adapter_from_patch(model, without_base_copies(patch, model, files))
    except PatchError as problem:
        own = [key for key in FIXED if key not in start.settings and key not in ("method", "rank", "alpha")]
        remedy = f"Merge it (lorakit merge {recipe.base.model} {start.folder} --out NEW), and train on the result"
        if own:
            remedy = f"Leave {', '.join(own)} out of the recipe, and they are taken from the patch"
        raise PatchError(f"{problem}. {remedy}") from None
    return patch


def without_base_copies(patch: Patch, model: nn.Module, files: BaseFiles) -> Patch:
    """Return the patch without full tensors that are the base's own: PEFT saves such copies of embeddings."""
    tied = tied_head(model)

    def read(name: str) -> Tensor:
        module, _, key = name.rpartition(".")
        stored = tensor_name(files, tied[1] if tied and module == tied[0] else module, key)
        return files.shard_of[stored].read(stored)

    return without_copies(patch, read, checkpoint_tensors(model))
