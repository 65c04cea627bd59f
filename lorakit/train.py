"""Train one adapter: the whole run, readable top to bottom."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lorakit.durable import disk_full_is_temporary, sweep_folder
from lorakit.engine import NonFiniteStep
from lorakit.errors import PatchError, RunError, TryAgainLater
from lorakit.job import Job, assemble
from lorakit.patch import adapter_patch, read_patch, remove_patch, write_patch
from lorakit.patch.card import model_card
from lorakit.patch.config import CONFIG_FILE
from lorakit.recipe import Recipe, load_recipe
from lorakit.run.checkpoint import Checkpoints, Progress
from lorakit.run.display import peak_memory_bytes
from lorakit.run.lock import locked
from lorakit.run.metrics import draw_loss
from lorakit.run.record import RECORD, RunRecord, flatten, open_record, versions
from lorakit.run.report import Report, reporting
from lorakit.run.stop import StopRequest, catching_signals
from lorakit.run.summary import announce, end_summary, start_summary

REACH_STEPS = 20  # by this step every adapter tensor must have had a gradient
SHOWN_ROWS = 8


def train(recipe: str | Path, *, fresh: bool = False, **overrides: Any) -> Path:
    """Train from a recipe file; ``overrides`` are recipe keys, as in ``**{"train.learning_rate": 2e-3}``.

    Returns the folder of the patch. Raises as ``run``, and RecipeError for what is wrong with the recipe.
    """
    return run(
        load_recipe(recipe, tuple(f"{key}={json.dumps(value, default=str)}" for key, value in overrides.items())),
        fresh=fresh,
    )


def run(recipe: Recipe, *, fresh: bool = False, say: Callable[[str], None] = announce) -> Path:
    """Train the recipe's adapter, or go on with it; returns the folder of its patch.

    An unfinished run of the same recipe in the output folder is continued and ends bit-identical to one that was
    never interrupted. ``fresh`` discards what the folder holds.

    Raises:
        LorakitError: something the user can fix; what was saved before is kept.
        TryAgainLater: stopped by a signal, or the disk is full; the same call goes on.
    """
    output, began = Path(recipe.output), time.monotonic()
    with locked(output), catching_signals() as stop, disk_full_is_temporary(output):
        settings = recipe.model_dump(mode="json")
        for folder in (output, output / "checkpoints"):
            sweep_folder(folder)
        record = open_record(output, settings, fresh=fresh)
        if record.finished:
            return already_finished(recipe, output, say)
        say(f"loading {recipe.base.model} and the rows of {recipe.data.train}")
        job = assemble(recipe, record.values)
        if fresh:  # only now: a recipe that cannot run discards nothing
            discard(output)
        progress = resume(job)
        record.start(
            data=job.data_facts(), base=job.base_facts(), dtype=job.dtype.name, dtype_why=job.dtype.why,
            engine=job.engine.observed(), total_steps=job.total_steps,
        )  # fmt: skip
        say(start_summary(job, progress))
        with reporting(
            output, last_step=progress.step, total_steps=job.total_steps, log_to=recipe.train.log_to,
            config=flatten(settings),
        ) as report:  # fmt: skip
            stop.patient = True
            loop(job, progress, report, stop)
        finish(job, progress, record, time.monotonic() - began)
        say(end_summary(job, progress))
    return output


def already_finished(recipe: Recipe, output: Path, say: Callable[[str], None]) -> Path:
    """Leave a finished run alone, once its patch is seen to be whole."""
    try:
        read_patch(output)
    except PatchError as problem:
        raise RunError(f"{problem}\nThis run had finished, but its patch is damaged: --fresh trains it again") from None
    Checkpoints(output / "checkpoints", recipe.train.keep_checkpoints).remove()
    say(f"{output}: trained already from this recipe (its data were not read again); --fresh trains it again")
    return output


def resume(job: Job) -> Progress:
    """Where the run stands: at its newest checkpoint, or at the start."""
    newest = job.checkpoints.newest()
    if newest is None:
        return Progress()
    progress, folder = newest
    job.checkpoints.restore(job.engine, folder)
    return progress


def loop(job: Job, progress: Progress, report: Report, stop: StopRequest) -> None:
    """Steps until the end. What is due after a step is decided from ``progress`` alone, so a resumed run agrees."""
    while True:
        improved = evaluate(job, progress, report, stop) if evaluation_is_due(job, progress) else False
        cut_short = evaluation_is_due(job, progress)  # a signal came while it ran: it is made after resuming
        done = not cut_short and (progress.step >= job.total_steps or no_longer_improves(job, progress))
        due = progress.step % job.recipe.train.save_every_steps == 0
        if progress.step and (due or done or improved or stop.asked()):
            job.checkpoints.save(job.engine, progress)
        if done:
            return
        if stop.asked():
            raise TryAgainLater(f"{stop.asked_by}: {saved(progress)}; the same command goes on from there")
        take_step(job, progress, report)


def saved(progress: Progress) -> str:
    """What a stop leaves behind."""
    return f"saved after step {progress.step}" if progress.step else "before the first step"


def take_step(job: Job, progress: Progress, report: Report) -> None:
    """One optimizer step."""
    began = time.perf_counter()
    try:
        result = job.engine.step(progress.step, job.batches.step(progress.step))
    except NonFiniteStep as problem:
        raise RunError(explain_non_finite(job, progress, problem)) from None
    progress.step += 1
    progress.tokens += result.num_tokens
    progress.label_tokens += result.num_label_tokens
    report.step(progress.step, result, time.perf_counter() - began)
    if progress.step >= min(REACH_STEPS, job.total_steps) and (unreached := job.engine.unreached()):
        raise RunError(
            f"{len(unreached)} adapter tensors have had no gradient after {progress.step} steps, so they cannot learn:"
            f" {', '.join(unreached[:4])}. Leave their layers out with adapter.exclude"
        )


def evaluation_is_due(job: Job, progress: Progress) -> bool:
    """Before the first step, every ``eval_every_steps``, and at the end; once each."""
    if job.held_out is None or progress.evaluated_step == progress.step:
        return False
    return progress.step % job.recipe.train.eval_every_steps == 0 or progress.step >= job.total_steps


def evaluate(job: Job, progress: Progress, report: Report, stop: StopRequest) -> bool:
    """Held-out loss of this step into ``progress``; True when it is the best and the best is to be kept."""
    held_out = job.held_out
    assert held_out is not None
    loss = job.engine.evaluate(
        (batch for rows in held_out.every_row_once() for batch in held_out.cut(rows)), stop.asked
    )
    if loss is None:
        return False
    if not math.isfinite(loss):
        raise RunError(
            f"step {progress.step}: the held-out loss is {loss}; look at the rows of data.eval, or lower"
            " train.learning_rate. Checkpoints are kept"
        )
    progress.evaluated_step = progress.step
    progress.last_eval_loss = loss
    if progress.first_eval_loss is None:
        progress.first_eval_loss = loss
    improved = progress.step > 0 and (progress.best_eval_loss is None or loss < progress.best_eval_loss)
    if improved:
        progress.best_eval_loss, progress.best_step, progress.evals_without_gain = loss, progress.step, 0
    elif progress.step > 0:
        progress.evals_without_gain += 1
    report.evaluation(progress.step, loss)
    return improved and job.recipe.train.select == "best"


def no_longer_improves(job: Job, progress: Progress) -> bool:
    """Whether early stopping ends the run here."""
    patience = job.recipe.train.early_stopping_evals
    return patience is not None and progress.evals_without_gain >= patience


def finish(job: Job, progress: Progress, record: RunRecord, seconds: float) -> None:
    """Write the patch, then the rest; the checkpoints go last. Everything in the patch is the same at every run."""
    recipe = job.recipe
    best = recipe.train.select == "best" and progress.best_step not in (None, progress.step)
    tensors = job.checkpoints.adapter_of(progress.best_step or 0) if best else job.engine.gather()
    losses = {"eval_loss_base": progress.first_eval_loss, "eval_loss": progress.last_eval_loss}
    if best:
        losses["eval_loss"] = progress.best_eval_loss
    facts = {
        "lorakit": versions()["lorakit"],
        "versions": versions(),
        "adapter": {"method": recipe.adapter.method, "rank": recipe.adapter.rank, "alpha": recipe.adapter.alpha},
        "base": job.base_fingerprint,
        "data": job.data_facts(),
        "recipe": {key: value for key, value in recipe.model_dump(mode="json").items() if key != "output"},
        "results": {key: value for key, value in losses.items() if value is not None},
        "step": progress.best_step if best else progress.step,
    }
    patch = adapter_patch(job.model, tensors, facts=facts, base_model=recipe.base.model, revision=recipe.base.revision)
    write_patch(
        job.output, patch, overwrite=True,
        card=model_card(
            job.output.name, recipe.base.model, facts,
            recipe.model_dump(mode="json", exclude_defaults=True, exclude={"output"}),
        ),
    )  # fmt: skip
    draw_loss(job.output / "metrics.jsonl", job.output / "loss.png", job.output.name)
    record.finish(
        steps=progress.step, tokens=progress.tokens, label_tokens=progress.label_tokens, results=facts["results"],
        engine=job.engine.observed(), peak_memory_bytes=peak_memory_bytes(), seconds_of_last_start=round(seconds, 2),
    )  # fmt: skip
    job.checkpoints.remove()


def discard(output: Path) -> None:
    """Remove what a run or a patch left in the output folder, the patch first; nothing else is touched."""
    if not ((output / RECORD).exists() or (output / CONFIG_FILE).exists()):
        return
    remove_patch(output)
    for name in ("metrics.jsonl", "loss.png", "README.md"):
        (output / name).unlink(missing_ok=True)
    Checkpoints(output / "checkpoints", 1).remove()
    (output / RECORD).unlink(missing_ok=True)


def explain_non_finite(job: Job, progress: Progress, problem: NonFiniteStep) -> str:
    """What happened, where, and what to do."""
    rows = job.batches.rows
    named = ", ".join(rows.where(row) for row in problem.rows[:SHOWN_ROWS])
    more = f" and {len(problem.rows) - SHOWN_ROWS} more" if len(problem.rows) > SHOWN_ROWS else ""
    newest = job.checkpoints.newest()
    kept = f"The checkpoint after step {newest[0].step} is kept" if newest else "No checkpoint was due yet"
    return (
        f"step {progress.step + 1}: {problem} (learning rate {job.recipe.train.learning_rate:g});"
        " nothing was updated.\n"
        f"  Rows in it: {named}{more}.\n  {kept}. Look at these rows, or lower train.learning_rate"
    )
