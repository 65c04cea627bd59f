"""Write and read a run's patches and checkpoints: a checkpoint is a patch, with optimizer state and progress beside it.

The bytes of a patch depend on recipe, data, base and step alone, so equal runs write equal patches. The base never
enters a checkpoint. Tensors are full and stored by name, so any backend and number of processes can resume. The newest
checkpoint is the highest step whose manifest verifies. There is no pointer file, because one could name a damaged one.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lorakit.base.from_recipe import recipe_template
from lorakit.errors import PatchError, RunError
from lorakit.files.atomic import MANIFEST, atomic_folder, manifest_matches, remove_folder, write_json, write_manifest
from lorakit.files.safetensors import file_parts, open_tensors
from lorakit.parallel import Engine, EngineState
from lorakit.parallel.group import SentTensors
from lorakit.patch import BaseShapes, read_patch, write_patch
from lorakit.patch.fit import with_head_names
from lorakit.patch.model import adapter_from_patch, patch_from_model
from lorakit.patch.write import model_card
from lorakit.recipe import Recipe
from lorakit.recipe.schema import EvaluationSection
from lorakit.version import versions


@dataclass(frozen=True)
class EvaluationResult:
    """The evaluation of a step."""

    step: int
    loss: float
    losses: dict[str, float]  # by source, where held-out rows have several or a named one
    measures: dict[str, float]  # of answers, and `measure/source` of a source's own; empty where none were generated


@dataclass
class Progress:
    """The counters of a run. The recipe and `step` determine everything else, such as rows and learning rate."""

    step: int = 0
    tokens: int = 0
    label_tokens: int = 0
    first: EvaluationResult | None = None
    last: EvaluationResult | None = None
    best: EvaluationResult | None = None  # None before the first evaluation of a trained step
    evals_without_gain: int = 0

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> "Progress":
        """Return the progress whose fields a checkpoint holds."""
        evaluations = {name: EvaluationResult(**values[name]) for name in ("first", "last", "best") if values[name]}
        return cls(**{**values, **evaluations})

    @property
    def best_step(self) -> int | None:
        return None if self.best is None else self.best.step

    def add_evaluation(self, now: EvaluationResult, settings: EvaluationSection) -> bool:
        """Add the evaluation of this step. True if the step is the best one so far, by `evaluation.best`.

        An evaluation without the measure that decides changes nothing of the best one.
        """
        self.first = self.first or now
        self.last = now
        best = settings.best
        # step 0 is the base alone: it cannot be the best step, because there is no trained adapter to save
        if self.step == 0 or best not in ("loss", *now.measures):
            return False
        improved = self.best is None
        if self.best is not None:
            value, before = (one.loss if best == "loss" else one.measures[best] for one in (now, self.best))
            improved = value < before if best == "loss" or settings.lower_is_better else value > before
        self.best = now if improved else self.best
        self.evals_without_gain = 0 if improved else self.evals_without_gain + 1
        return improved

    def results(self, step: int, *, started: bool) -> dict[str, float]:
        """Return the held-out loss and measures of a step as far as they are known, and the loss before the first step.

        started: True if the run began with a patch, so that the first loss is not the base's.
        """
        results = dict[str, float]()
        if self.first is not None:
            results["eval_loss_start" if started else "eval_loss_base"] = self.first.loss
        for one in (self.best, self.last):
            if one is not None and one.step == step:
                results["eval_loss"] = one.loss
                results |= {f"eval_loss/{source}": loss for source, loss in one.losses.items()}
                results |= {f"eval_{name}": value for name, value in one.measures.items()}
        return results


@dataclass(frozen=True)
class RunPatches:
    """The patches of one run. model: the adapted model, also sharded. facts: those that are the same at every step."""

    recipe: Recipe
    model: nn.Module
    facts: Mapping[str, Any]

    def write(self, folder: Path, name: str, tensors: Mapping[str, Tensor], step: int, progress: Progress) -> None:
        """Write the patch of a step, in place of an earlier one. name: of the model card. tensors: full, by name.

        Raises PatchError: a value is not finite.
        """
        recipe = self.recipe
        facts = {**self.facts, "results": self.results(progress, step), "step": step}
        embeds = recipe.objective.name == "embed"
        base = recipe.base
        patch = patch_from_model(
            self.model, tensors, metadata=facts, base_model=base.model, revision=base.revision, embeds=embeds
        )
        settings = with_file_names(recipe.model_dump(mode="json", exclude_defaults=True, exclude={"output"}))
        write_patch(folder, patch, overwrite=True, card=model_card(name, patch, settings))

    def results(self, progress: Progress, step: int) -> dict[str, float]:
        """Return the results of a step. The first loss is not the base's after a start, or of a new head."""
        return progress.results(step, started="start" in self.facts or self.recipe.objective.has_head)

    def read(self, folder: Path) -> dict[str, Tensor]:
        """Return the adapter's tensors in a patch that `write` wrote, to the bit."""
        patch = with_head_names(read_patch(folder), BaseShapes.of(self.model), self.model)
        return adapter_from_patch(self.model, patch)


def patch_facts(
    recipe: Recipe, base: Mapping[str, Any], data: Mapping[str, Any], start: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the facts of all patches of a run. base: its fingerprint. start: the patch it began with, or None."""
    return {
        "lorakit": versions()["lorakit"],
        "versions": versions(),
        "base": base,
        "data": {key: {**part, "sources": _file_names(part["sources"])} for key, part in data.items()},
        "recipe": with_file_names(recipe.model_dump(mode="json", exclude={"output", "parallel"})),
        **({"start": start} if start else {}),
        **({"chat_template": template} if (template := recipe_template(recipe)) is not None else {}),
        **({"chat_template_kwargs": kwargs} if (kwargs := recipe.data.chat_template_kwargs) else {}),
    }


def with_file_names(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe whose data files have no absolute paths, because patches are published and paths name people.

    The base's path stays, because PEFT loads the base by it. Of `adapter.start_from` only the folder's name stays.
    """
    may_name_files = ("train", "eval", "chat_template", "teacher", "teacher_base")
    changed = {
        name: {key: _file_names(value) if key in may_name_files else value for key, value in section.items()}
        for name, section in settings.items()
    }
    if start := changed.get("adapter", {}).get("start_from"):
        changed["adapter"]["start_from"] = Path(start).absolute().name
    return changed


def _file_names(names: Any) -> Any:
    """Return the last parts of absolute paths, also in lists and in sources of rows; other values are unchanged."""
    if isinstance(names, str):
        return Path(names).name if Path(names).is_absolute() else names
    if isinstance(names, dict):
        return {**names, "path": _file_names(names["path"])}
    return [_file_names(name) for name in names] if isinstance(names, list | tuple) else names


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run, in a folder: each is a patch, with optimizer state and progress beside it."""

    folder: Path

    def save(self, engine: Engine, patches: RunPatches, progress: Progress) -> Path | None:
        """Write a checkpoint of this step, return its folder; None if it exists. Collective.

        Of the others, the best step's stays, and the newest ones, as many as `train.keep_checkpoints` says.
        """
        target = self.path(progress.step)
        if engine.group.run_on_rank_0(lambda: target.exists() and manifest_matches(target)):
            return None
        state = engine.state_dict()
        engine.group.run_on_rank_0(lambda: self._commit(target, state, patches, progress))
        return target

    def _commit(self, target: Path, state: EngineState, patches: RunPatches, progress: Progress) -> None:
        remove_folder(target)  # one of the same step that does not verify
        with atomic_folder(target) as staging:
            try:
                patches.write(staging, target.name, state.adapter, progress.step, progress)
            except PatchError as problem:
                raise RunError(
                    f"step {progress.step}: {problem}. Earlier checkpoints stay; lower train.learning_rate"
                ) from None
            with open(staging / "optimizer.safetensors", "wb") as file:
                file.writelines(file_parts(state.optimizer, {"format": "pt"}))
            write_json(staging / "progress.json", asdict(progress))
            write_manifest(staging)
        steps = sorted(step for step in self._steps() if step != progress.best_step)
        for step in steps[: -patches.recipe.train.keep_checkpoints]:
            remove_folder(self.path(step))

    def newest(self) -> tuple[Progress, Path] | None:
        """Return the newest checkpoint that verifies, or None."""
        for step in sorted(self._steps(), reverse=True):
            folder = self.path(step)
            if manifest_matches(folder):  # a checkpoint that was damaged is passed over
                return Progress.of_json(json.loads((folder / "progress.json").read_text())), folder
        return None

    def restore(self, engine: Engine, patches: RunPatches) -> Progress | None:
        """Load the newest checkpoint that verifies into the engine, and return its progress; None if there is none.

        Only rank 0 reads files, because the folder need not exist on other machines. It sends single tensors, because a
        process may store a small part of each. Collective.
        """
        group = engine.group
        newest = group.run_on_rank_0(self.newest)
        if newest is None:
            return None
        progress, folder = newest

        def read() -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
            optimizer = open_tensors(folder / "optimizer.safetensors")
            return patches.read(folder), {name: optimizer.read(name) for name in optimizer.entries}

        parts = group.run_on_all(lambda: read() if group.is_rank_0 else (None, None))
        engine.load_state_dict(EngineState(*(SentTensors(group, tensors) for tensors in parts)))
        return progress

    def remove_all_but_newest(self) -> None:
        if (newest := self.newest()) is not None:
            for step in [step for step in self._steps() if step != newest[0].step]:
                remove_folder(self.path(step))

    def _steps(self) -> Iterator[int]:
        for path in self.folder.glob("step-*"):
            if re.fullmatch(r"step-\d{8}", path.name) and (path / MANIFEST).is_file():
                yield int(path.name.removeprefix("step-"))

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint, which is a patch; it need not exist."""
        return self.folder / f"step-{step:08d}"
