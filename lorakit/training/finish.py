"""End a run: write its patch and its record, and delete what the run no longer needs.

Invariant: checkpoints are deleted last, so a run that is killed here can still be resumed.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lorakit.errors import PatchError, RunError
from lorakit.patch import patch_from_model, read_patch, remove_patch, write_patch
from lorakit.patch.adapter_config import CONFIG_FILE
from lorakit.patch.model_card import model_card
from lorakit.recipe import Recipe
from lorakit.run.display import peak_memory_bytes
from lorakit.run.metrics import draw_loss
from lorakit.run.record import RECORD, RunRecord, versions
from lorakit.training.checkpoint import Checkpoints, Progress
from lorakit.training.job import Job


def finish(job: Job, progress: Progress, record: RunRecord, seconds: float) -> None:
    """Write the patch, the picture of the loss and the record, then delete the checkpoints. Collective.

    The patch contains nothing that differs between equal runs, such as times, so they write equal bytes. seconds: the
    duration since this start.
    """
    group = job.engine.group
    # the best step's adapter is in its checkpoint, unless the best step is the last one
    tensors = job.engine.adapter_state_dict() if chosen_step(job.recipe, progress) == progress.step else None
    ranks = group.all_gather(job.engine.layout() | {"peak_memory_bytes": peak_memory_bytes()})
    group.run_on_rank_0(lambda: write_results(job, progress, record, seconds, tensors, ranks))


def chosen_step(recipe: Recipe, progress: Progress) -> int:
    """Return the step whose adapter becomes the patch: the best one if `train.select` is `best`, else the last one."""
    if recipe.train.select == "best" and progress.best_step is not None:
        return progress.best_step
    return progress.step


def stops_early(recipe: Recipe, progress: Progress) -> bool:
    """True if the held-out loss has not improved in the last `early_stopping_evals` evaluations."""
    patience = recipe.train.early_stopping_evals
    return patience is not None and progress.evals_without_gain >= patience


def early_stop(job: Job, progress: Progress) -> str | None:
    """Return why a run that is done took fewer steps than the recipe says; None if it took all."""
    if progress.step >= job.total_steps or not stops_early(job.recipe, progress):
        return None
    count = progress.evals_without_gain
    evaluations = "evaluation" if count == 1 else f"{count} evaluations"
    return (
        f"after step {progress.step} of {job.total_steps}: the held-out loss was no better in the last {evaluations}"
        " (train.early_stopping_evals)"
    )


def write_results(
    job: Job,
    progress: Progress,
    record: RunRecord,
    seconds: float,
    tensors: dict[str, Tensor] | None,
    ranks: list[dict[str, Any]],
) -> None:
    """Write the files of `finish`. Runs on rank 0 alone.

    tensors: the adapter after the last step; None if it is to be read from the chosen step's checkpoint. ranks: the
    layouts of all ranks.
    """
    recipe, step = job.recipe, chosen_step(job.recipe, progress)
    losses = {
        "eval_loss_base": progress.first_eval_loss,
        "eval_loss": progress.last_eval_loss if step == progress.step else progress.best_eval_loss,
    }
    facts = {
        "lorakit": versions()["lorakit"],
        "versions": versions(),
        "adapter": {"method": recipe.adapter.method, "rank": recipe.adapter.rank, "alpha": recipe.adapter.alpha},
        "base": job.base_fingerprint,
        "data": {key: {**part, "sources": _file_names(part["sources"])} for key, part in job.data_facts().items()},
        "recipe": _with_file_names(recipe.model_dump(mode="json", exclude={"output", "parallel"})),
        "results": {key: value for key, value in losses.items() if value is not None},
        "step": step,
    }
    patch = patch_from_model(
        job.loss_model.model,
        tensors if tensors is not None else job.checkpoints.adapter_of(step),
        metadata=facts,
        base_model=recipe.base.model,
        revision=recipe.base.revision,
    )
    chosen_settings = _with_file_names(recipe.model_dump(mode="json", exclude_defaults=True, exclude={"output"}))
    card = model_card(job.output.name, recipe.base.model, facts, chosen_settings)
    write_patch(job.output, patch, overwrite=True, card=card)
    draw_loss(job.output / "metrics.jsonl", job.output / "loss.png", job.output.name)
    record.finish(
        steps=progress.step,
        tokens=progress.tokens,
        label_tokens=progress.label_tokens,
        results=facts["results"],
        engine=ranks[0],
        ranks=ranks[1:],
        peak_memory_bytes=ranks[0]["peak_memory_bytes"],
        seconds_of_last_start=round(seconds, 2),
        **({"stopped_early": why} if (why := early_stop(job, progress)) else {}),
        **({"compiled": job.compiled.stats()} if job.compiled else {}),
    )
    job.checkpoints.remove()


def _with_file_names(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe whose data files have no absolute paths, because patches are published and paths name people.

    The base's path stays, because PEFT loads the base by it.
    """
    data = settings["data"]
    names = {key: _file_names(data[key]) for key in ("train", "eval") if data.get(key) is not None}
    return {**settings, "data": {**data, **names}}


def _file_names(names: str | Sequence[str]) -> str | list[str]:
    """Return the last parts of absolute paths; other names are unchanged."""
    if isinstance(names, str):
        return Path(names).name if Path(names).is_absolute() else names
    return [str(_file_names(name)) for name in names]


def discard(output: Path) -> None:
    """Delete a run's or a patch's files in the output folder. Files of other programs stay.

    The record goes last, so that a call which was killed can be repeated.
    """
    if not ((output / RECORD).exists() or (output / CONFIG_FILE).exists()):
        return
    remove_patch(output)
    for name in ("metrics.jsonl", "loss.png", "README.md"):
        (output / name).unlink(missing_ok=True)
    Checkpoints(output / "checkpoints", 1).remove()
    (output / RECORD).unlink(missing_ok=True)


def verify_finished_run(recipe: Recipe, output: Path, say: Callable[[str], None]) -> None:
    """Verify the patch of a run that has finished before, and delete checkpoints that it may have left.

    Raises:
        RunError: the patch is damaged.
    """
    try:
        read_patch(output)
    except PatchError as problem:
        raise RunError(f"{problem}\nThis run had finished, but its patch is damaged: --fresh trains it again") from None
    Checkpoints(output / "checkpoints", recipe.train.keep_checkpoints).remove()
    say(f"{output}: trained already from this recipe (its data were not read again); --fresh trains it again")
