"""A run's output folder: open it and begin, write patch and record at the end, delete what is no longer needed.

Invariant: checkpoints are deleted last, so a run that is killed here can still be resumed. The last step's stays, so
that the run can be made longer.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lorakit.base.find import find_base, find_tokenizer
from lorakit.base.transformers_io import tokenizer_files
from lorakit.errors import PatchError, RunError
from lorakit.files.atomic import disk_full_as_retryable, fast_digest, manifest_matches, remove_folder, sweep_folder
from lorakit.files.text import Say
from lorakit.parallel import Group
from lorakit.patch import read_patch
from lorakit.patch.adapter_config import CONFIG_FILE
from lorakit.patch.pooling import write_pooling
from lorakit.patch.write import remove_patch
from lorakit.recipe import Recipe
from lorakit.run.charts import draw_losses
from lorakit.run.display import peak_memory_bytes
from lorakit.run.facts import METRICS, read_run
from lorakit.run.record import OTHERS, RECORD, SAMPLES, START_OVER, RunRecord, locked, open_record
from lorakit.run.start_from import Start, choose_start
from lorakit.training.checkpoint import Checkpoints, Progress
from lorakit.training.learning_rate import rate_of
from lorakit.training.run import Run


@dataclass(frozen=True)
class Output:
    """An output folder that is open, and locked. recipe: with the settings of `start`. opened: seconds."""

    recipe: Recipe
    start: Start | None
    record: RunRecord
    opened: float

    @property
    def seconds(self) -> float:
        """Seconds since this start of the run."""
        return time.monotonic() - self.opened


@contextmanager
def open_output(recipe: Recipe, group: Group, *, fresh: bool) -> Iterator[Output]:
    """Lock a run's output folder inside the block, delete staging files of dead processes, and read its record."""
    opened = time.monotonic()
    folder = Path(recipe.output)
    start = group.run_on_rank_0(lambda: choose_start(recipe, fresh=fresh))
    recipe = start.apply(recipe) if start else recipe

    def open_folder() -> RunRecord:
        resources.enter_context(locked(folder))
        for stale in (folder, folder / "checkpoints"):
            sweep_folder(stale)
        return open_record(folder, recipe.model_dump(mode="json"), fresh=fresh)

    with disk_full_as_retryable(folder), ExitStack() as resources:
        yield Output(recipe, start, group.run_on_rank_0(open_folder), opened)


def begin(run: Run, record: RunRecord, why: str) -> tuple[list[dict[str, Any]], str | None]:
    """Record that a run starts here, or goes on. Returns the layouts of all ranks, and the result of `go_on`."""
    group = run.engine.group
    longer = group.run_on_rank_0(lambda: go_on(run, record))
    ranks = group.all_gather(run.engine.layout())
    auto = {"auto": why} if why else {}
    group.run_on_rank_0(lambda: record.start(**run.facts(), engine=ranks[0], ranks=ranks[1:], **auto))
    return ranks, longer


def finish(run: Run, output: Output) -> None:
    """Write the patches, the picture of the loss and the record, then delete the older checkpoints. Collective.

    The patch contains nothing that differs between equal runs, such as times, so they write equal bytes. A run that
    was stopped before its first step has none.
    """
    group = run.engine.group
    progress = run.progress
    tensors = run.engine.adapter_state_dict()
    ranks = group.all_gather(run.engine.layout() | {"peak_memory_bytes": peak_memory_bytes()})

    def write_results() -> None:
        if progress.step:
            write_patches(run, tensors)
        why = early_stop(run)
        curve = read_run(run.output).curve
        draw_losses(run.output.name, curve("loss"), curve("eval_loss"), run.output / "loss.png")
        output.record.finish(
            status="stopped" if run.stopped else "finished",
            steps=progress.step,
            best_step=progress.best_step,
            tokens=progress.tokens,
            label_tokens=progress.label_tokens,
            results=run.patches.results(progress, patch_steps(run.recipe, progress)[0]),
            engine=ranks[0],
            ranks=ranks[1:],
            peak_memory_bytes=ranks[0]["peak_memory_bytes"],
            seconds_of_last_start=round(output.seconds, 2),
            metrics=fast_digest(run.output / METRICS),
            **({"stopped_early": why} if why else {}),
            **({"lost_lines_of_trackers": run.lost_lines} if run.lost_lines else {}),
        )
        run.checkpoints.remove_all_but_newest()

    group.run_on_rank_0(write_results)


def patch_steps(recipe: Recipe, progress: Progress) -> tuple[int, dict[str, int]]:
    """Return the step of a run's patch, and `best` or `last`, whose patch is in a folder below, where it is another."""
    steps = {"last": progress.step, "best": progress.step if progress.best_step is None else progress.best_step}
    chosen = steps[recipe.train.select]
    return chosen, {name: step for name, step in steps.items() if step != chosen}


def no_gain(recipe: Recipe, progress: Progress) -> str | None:
    """Return why a run stops early, its last `early_stopping_evals` evaluations; None if they improved, or need not."""
    patience = recipe.train.early_stopping_evals
    count = progress.evals_without_gain
    if patience is None or count < patience:
        return None
    best = recipe.evaluation.best
    measure = "the held-out loss" if best == "loss" else f"the measure {best} (evaluation.best)"
    return f"{measure} was no better in the last {'evaluation' if count == 1 else f'{count} evaluations'}"


def early_stop(run: Run) -> str | None:
    """Return why a run that is done took fewer steps than the recipe says; None if it took all."""
    progress = run.progress
    why = no_gain(run.recipe, progress)
    if run.stopped or progress.step >= run.total_steps or why is None:
        return run.stopped
    return f"after step {progress.step} of {run.total_steps}: {why} (train.early_stopping_evals)"


def write_patches(run: Run, tensors: Mapping[str, Tensor]) -> None:
    """Write the patch of the chosen step into the output folder, and of best and last the other one below it.

    The other one first, because on a run that was made longer its only copy may be the patch in the output folder.
    """
    progress = run.progress
    chosen, others = patch_steps(run.recipe, progress)
    values = {
        step: tensors if step == progress.step else saved_adapter(run, step) for step in {chosen, *others.values()}
    }
    if (main := values[chosen]) is None:
        raise RunError(adapter_is_gone(run, chosen))
    for name, step in others.items():
        if (other := values[step]) is not None:  # else `end_summary` says so
            _write_pooling(run, run.output / name)
            run.patches.write(run.output / name, f"{run.output.name} ({name})", other, step, progress)
    _write_pooling(run, run.output)  # before the patch, whose config is the last file
    run.patches.write(run.output, run.output.name, main, chosen, progress)
    for name in OTHERS - others.keys():  # of an earlier end of this run
        _discard_patch(run.output / name)


def _write_pooling(run: Run, folder: Path) -> None:
    """Write sentence-transformers' files and the tokenizer beside a patch of embeddings."""
    recipe = run.recipe
    if recipe.objective.name == "embed":
        tokenizer = find_tokenizer(recipe.base.tokenizer, find_base(recipe.base.model, recipe.base.revision))
        width = run.patches.model.config.get_text_config().hidden_size  # type: ignore[union-attr, operator]
        write_pooling(folder, recipe.objective.row_settings["pooling"], width, tokenizer_files(tokenizer))


def saved_adapter(run: Run, step: int) -> dict[str, Tensor] | None:
    """Return the best step's adapter from its checkpoint, or the patch of an earlier end; None: both are gone."""
    if manifest_matches(run.checkpoints.path(step)):
        return run.patches.read(run.checkpoints.path(step))
    for folder in (run.output, run.output / "best"):
        if (folder / CONFIG_FILE).exists() and read_patch(folder).metadata.get("step") == step:
            return run.patches.read(folder)
    return None


def adapter_is_gone(run: Run, step: int) -> str:
    return (
        f"{run.output}: the adapter of the best step, {step}, is gone (from checkpoints/, the patch here, best/);"
        f" put it back, or {START_OVER}"
    )


def discard(output: Path) -> None:
    """Delete a run's or a patch's files; others stay. The record goes last, so that a killed call can be repeated."""
    if not ((output / RECORD).exists() or (output / CONFIG_FILE).exists()):
        return
    for name in OTHERS:
        _discard_patch(output / name)
    remove_patch(output)
    for name in ("metrics.jsonl", "loss.png", SAMPLES, "README.md"):
        (output / name).unlink(missing_ok=True)
    remove_folder(output / "checkpoints")
    (output / RECORD).unlink(missing_ok=True)


def _discard_patch(folder: Path) -> None:
    """Delete a patch below the output folder, and its folder if nothing else is in it."""
    if (folder / CONFIG_FILE).exists():
        remove_patch(folder)
        (folder / "README.md").unlink(missing_ok=True)
        with suppress(OSError):
            folder.rmdir()


def verify_finished_run(recipe: Recipe, say: Say) -> None:
    """Verify a finished run's patch, and delete checkpoints that it no longer needs. Raises RunError: it is damaged."""
    output = Path(recipe.output)
    try:
        read_patch(output)
    except PatchError as problem:
        raise RunError(f"{problem}\nThis run had finished, but its patch is damaged; {START_OVER}") from None
    Checkpoints(output / "checkpoints").remove_all_but_newest()
    say(f"{output}: trained already from this recipe (its data were not read again). To train again, {START_OVER}")


def check_length(before: int | None, total: int) -> None:
    """Raise RunError if a run would be shorter than it was begun. before: its steps in run.json, None for a new run."""
    if before is not None and total < before:
        raise RunError(
            f"train.steps, train.epochs: {before} steps before, {total} now; a run can be made longer, not shorter. Put"
            f" the number back, choose another output, or {START_OVER}"
        )


def go_on(run: Run, record: RunRecord) -> str | None:
    """Return what is different from now on in a run that was made longer; None in any other run. For rank 0 alone.

    Raises RunError: the run cannot go on with the end that its recipe has now.
    """
    before = record.values.get("total_steps")  # None if it never started
    total = run.total_steps
    recipe = run.recipe
    progress = run.progress
    check_length(before, total)
    if record.goes_on and progress.step == 0:
        raise RunError(
            f"{run.output}: this run finished and holds no state of its last step (checkpoints/), so it cannot go on."
            f" Start a new one from its patch: adapter.start_from: {run.output}, and another output"
        )
    best = progress.best_step
    if record.goes_on and best not in (None, progress.step) and saved_adapter(run, best) is None:
        raise RunError(adapter_is_gone(run, best))
    if before is None or total == before:
        return None
    if (why := no_gain(recipe, progress)) is not None:
        raise RunError(
            f"train.early_stopping_evals: {recipe.train.early_stopping_evals}: {why} up to step {progress.step}, so no"
            f" step of the {total} would be trained; raise it, or set it to null"
        )
    step = progress.step
    last = rate_of(recipe, before)(max(0, step - 1))
    following = rate_of(recipe, total)(step)
    return (
        f"{total} steps instead of {before}; the {recipe.train.schedule} schedule is that of {total} steps from now on:"
        f" learning rate {following:.2e} in step {step + 1}" + (f", {last:.2e} in step {step}" if step else "")
    )
