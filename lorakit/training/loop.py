"""Train one adapter: the whole run, readable top to bottom."""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any

from lorakit.data import Prefetcher
from lorakit.errors import RunError, TemporaryFailure
from lorakit.files.atomic import disk_full_as_retryable, sweep_folder
from lorakit.parallel import Engine, NonFiniteStep
from lorakit.parallel.setup import distributed_engine
from lorakit.recipe import Recipe
from lorakit.run.lock import locked
from lorakit.run.record import RunRecord, flatten, open_record
from lorakit.run.report import NullReport, Report, reporting
from lorakit.run.signals import StopRequest, catching_signals
from lorakit.training.checkpoint import Progress
from lorakit.training.finish import already_finished, discard, finish
from lorakit.training.job import Job, build_job
from lorakit.training.summary import announce, end_summary, start_summary

REACH_STEPS = 20  # by this step every adapter tensor must have had a gradient
SHOWN_ROWS = 8


def run(
    recipe: Recipe, *, fresh: bool = False, why: str = "", say: Callable[[str], None] = announce
) -> Path:  # fmt: skip
    """Train the recipe's adapter, or go on with it; returns the folder of its patch.

    An unfinished run of the same recipe in the output folder is continued and ends bit-identical to one that was
    never interrupted. ``fresh`` discards what the folder holds; ``why`` is recorded: the reason for what was `auto`.

    Raises:
        LorakitError: something the user can fix; what was saved before is kept.
        TemporaryFailure: stopped by a signal, or the disk is full; the same call goes on.
    """
    with catching_signals() as stop, distributed_engine(recipe, stop.wait) as engine:
        return run_on(engine, recipe, stop, fresh=fresh, why=why, say=say if engine.group.is_rank_0 else _print_nothing)


def run_on(
    engine: Engine, recipe: Recipe, stop: StopRequest, *, fresh: bool, why: str, say: Callable[[str], None]
) -> Path:  # fmt: skip
    """``run`` in one of the run's processes. The first of them alone writes, shows and says."""
    output, group, began = Path(recipe.output), engine.group, time.monotonic()
    settings = recipe.model_dump(mode="json")
    with disk_full_as_retryable(output), ExitStack() as held:
        record = group.run_on_rank_0(lambda: open_output_folder(output, settings, held, fresh=fresh))
        if record.finished:
            group.run_on_rank_0(lambda: already_finished(recipe, output, say))
            return output
        say(f"loading {recipe.base.model} and the rows of {recipe.data.train}")
        job = build_job(recipe, engine, record.values)
        if fresh:  # only now: a recipe that cannot run discards nothing
            group.run_on_rank_0(lambda: discard(output))
        progress = job.checkpoints.restore(engine) or Progress()
        ranks = group.all_gather(engine.observed())
        group.run_on_rank_0(lambda: record.start(
            data=job.data_facts(), base=job.base_facts(), dtype=job.dtype.name, dtype_why=job.dtype.why,
            engine=ranks[0], ranks=ranks[1:], total_steps=job.total_steps, **({"auto": why} if why else {}),
        ))  # fmt: skip
        say(start_summary(job, progress, ranks, why))
        with reporting(
            output, last_step=progress.step, total_steps=job.total_steps, log_to=recipe.train.log_to,
            config=flatten(settings), shown=group.is_rank_0,
        ) as report:  # fmt: skip
            stop.deferred = True
            with closing(Prefetcher(job.batches, job.total_steps)) as batches:
                loop(job, batches, progress, report, stop)
        finish(job, progress, record, time.monotonic() - began)
        say(end_summary(job, progress))
    return output


def open_output_folder(output: Path, settings: dict[str, Any], held: ExitStack, *, fresh: bool) -> RunRecord:
    """The output folder for this run alone until ``held`` ends, swept of what dead processes left."""
    held.enter_context(locked(output))
    for folder in (output, output / "checkpoints"):
        sweep_folder(folder)
    return open_record(output, settings, fresh=fresh)


def _print_nothing(text: str) -> None:
    """What the other processes say."""


def loop(job: Job, batches: Prefetcher, progress: Progress, report: Report | NullReport, stop: StopRequest) -> None:
    """Steps until the end. What is due after a step is decided from ``progress`` alone, so a resumed run agrees."""
    while True:
        improved = evaluate(job, progress, report, stop) if evaluation_is_due(job, progress) else False
        evaluation_interrupted = evaluation_is_due(
            job, progress
        )  # a signal came while it ran: it is made after resuming
        done = not evaluation_interrupted and (progress.step >= job.total_steps or no_longer_improves(job, progress))
        due = progress.step % job.recipe.train.save_every_steps == 0
        stopping = job.engine.group.any(stop.asked())  # all stop after the same step
        if progress.step and (due or done or improved or stopping):
            job.engine.phase(f"step {progress.step}: saving")
            job.checkpoints.save(job.engine, progress)
        if done:
            return
        if stopping:
            asked_by = next(filter(None, job.engine.group.all_gather(stop.asked_by)))
            raise TemporaryFailure(f"{asked_by}: {saved(progress)}; the same command goes on from there")
        take_step(job, batches, progress, report)


def saved(progress: Progress) -> str:
    """What a stop leaves behind."""
    return f"saved after step {progress.step}" if progress.step else "before the first step"


def take_step(job: Job, batches: Prefetcher, progress: Progress, report: Report | NullReport) -> None:
    """One optimizer step."""
    began = time.perf_counter()
    job.engine.phase(f"step {progress.step + 1}")
    try:
        with job.compiled.raising_run_errors() if job.compiled else nullcontext():
            result = job.engine.step(progress.step, batches.step(progress.step))
    except NonFiniteStep as problem:
        raise RunError(explain_non_finite(job, progress, problem)) from None
    progress.step += 1
    progress.tokens += result.num_tokens
    progress.label_tokens += result.num_label_tokens
    if job.compiled:
        job.compiled.record_step(progress.step)
    report.step(progress.step, result, time.perf_counter() - began)
    if progress.step >= min(REACH_STEPS, job.total_steps) and (unreached := job.engine.tensors_without_gradient()):
        raise RunError(
            f"{len(unreached)} adapter tensors have had no gradient after {progress.step} steps, so they cannot learn:"
            f" {', '.join(unreached[:4])}. Leave their layers out with adapter.exclude"
        )


def evaluation_is_due(job: Job, progress: Progress) -> bool:
    """Before the first step, every ``eval_every_steps``, and at the end; once each."""
    if job.held_out is None or progress.evaluated_step == progress.step:
        return False
    return progress.step % job.recipe.train.eval_every_steps == 0 or progress.step >= job.total_steps


def evaluate(job: Job, progress: Progress, report: Report | NullReport, stop: StopRequest) -> bool:
    """Held-out loss of this step into ``progress``; True when it is the best and the best is to be kept."""
    held_out = job.held_out
    assert held_out is not None
    job.engine.phase(f"step {progress.step}: held-out rows")
    loss = job.engine.evaluate(
        (batch for rows in held_out.eval_batches() for batch in held_out.micro_batches(rows)), stop.asked
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


def explain_non_finite(job: Job, progress: Progress, problem: NonFiniteStep) -> str:
    """What happened, where, and what to do."""
    rows = job.batches.rows
    named = ", ".join(rows.location(row) for row in problem.rows[:SHOWN_ROWS])
    more = f" and {len(problem.rows) - SHOWN_ROWS} more" if len(problem.rows) > SHOWN_ROWS else ""
    newest = job.checkpoints.newest()
    kept = f"The checkpoint after step {newest[0].step} is kept" if newest else "No checkpoint was due yet"
    return (
        f"step {progress.step + 1}: {problem} (learning rate {job.recipe.train.learning_rate:g});"
        " nothing was updated.\n"
        f"  Rows in it: {named}{more}.\n  {kept}. Look at these rows, or lower train.learning_rate"
    )
