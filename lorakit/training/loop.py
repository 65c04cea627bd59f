"""Train one adapter. The full run, from the recipe to the patch, to be read top to bottom.

Invariant: `progress` and the recipe alone decide what happens after a step, so a run that was stopped anywhere and
resumed ends in the same bytes as one that was not.
"""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from lorakit.base.start_patch import Start
from lorakit.data import Prefetcher
from lorakit.errors import RunError, TemporaryFailure
from lorakit.files.atomic import disk_full_as_retryable, sweep_folder
from lorakit.inference.measures import check_measures
from lorakit.launch.environment import World
from lorakit.parallel import Engine, NonFiniteStep
from lorakit.parallel.setup import distributed_engine
from lorakit.recipe import Recipe
from lorakit.run.lock import locked
from lorakit.run.record import RunRecord, flatten, open_record, read_result
from lorakit.run.report import NullReport, Report, check_trackers, reporting
from lorakit.run.signals import StopRequest, catching_signals
from lorakit.training.callbacks import NO_HOOKS, Callbacks, Evaluation, Hooks, RunStart, Step
from lorakit.training.checkpoint import SaveSchedule
from lorakit.training.finish import discard, finish, go_on, stops_early, verify_finished_run
from lorakit.training.job import Job, build_job, choose_start
from lorakit.training.progress import Progress
from lorakit.training.summary import announce, end_summary, start_summary

MAX_STEPS_WITHOUT_GRADIENT: Final = 20  # by this step every adapter tensor must have had one
SHOWN_ROWS: Final = 8
Say = Callable[[str], None]


def run(
    recipe: Recipe,
    world: World | None = None,
    *,
    fresh: bool = False,
    why: str = "",
    say: Callable[[str], None] = announce,
    hooks: Hooks = NO_HOOKS,
    clock: Callable[[], float] = time.monotonic,
) -> Path:
    """Train a recipe's adapter, or resume it, in this process. Returns the folder of the patch.

    In a run of several processes, every process calls this function.

    world: this process's rank and group, as its launcher set them; None if no launcher started it. fresh: discard
    what the output folder contains, instead of resuming. why: the reason for the values that `auto` keys were given,
    for the record. say: prints the few lines before and after the run. hooks: the caller's callbacks and functions.
    clock: seconds, for train.save_every_seconds.

    Raises:
        LorakitError: a problem that the user can solve. Checkpoints stay. An error of a callback likewise.
        TemporaryFailure: a signal stopped the run, or the disk is full. The same call resumes the run.
    """
    with catching_signals() as stop, distributed_engine(recipe, world, stop.defer) as engine:
        if not engine.group.is_rank_0:
            say = print_nothing
        return run_on_engine(engine, recipe, stop, fresh=fresh, why=why, say=say, hooks=hooks, clock=clock)


def run_on_engine(
    engine: Engine,
    recipe: Recipe,
    stop: StopRequest,
    *,
    fresh: bool,
    why: str,
    say: Callable[[str], None],
    hooks: Hooks = NO_HOOKS,
    clock: Callable[[], float] = time.monotonic,
) -> Path:
    """Carry out `run` on an open engine: assemble the job, restore its newest checkpoint, train, write the patch."""
    output = Path(recipe.output)
    group = engine.group
    start_time = time.monotonic()
    start = group.run_on_rank_0(lambda: choose_start(recipe, fresh=fresh))
    recipe = start.apply(recipe) if start else recipe
    settings = recipe.model_dump(mode="json")
    callbacks = Callbacks(hooks.callbacks if group.is_rank_0 else ())
    with disk_full_as_retryable(output), ExitStack() as resources:
        record = group.run_on_rank_0(lambda: open_output_folder(output, settings, resources, fresh=fresh))
        if record.finished:
            group.run_on_rank_0(lambda: verify_finished_run(recipe, output, say))
            return output

        job, progress = load_job(engine, recipe, record, start, say, fresh=fresh, hooks=hooks)
        begin_training(job, progress, record, why, say)
        with reporting(
            output,
            last_step=progress.step,
            total_steps=job.total_steps,
            log_to=recipe.train.log_to,
            config=flatten(settings),
            shown=group.is_rank_0,
        ) as report:
            stop.defer()  # from here on the loop handles signals, after the step they interrupt
            model = job.loss_model.model
            callbacks.call("on_start", RunStart(output, recipe, model, progress.step, job.total_steps))
            every_seconds = recipe.train.save_every_seconds if group.is_rank_0 else None
            saves = SaveSchedule(recipe.train.save_every_steps, every_seconds, clock)
            with closing(Prefetcher(job.batches, job.total_steps)) as batches:
                stopped = train_loop(job, batches, progress, report, stop, callbacks, saves)

        finish(job, progress, record, time.monotonic() - start_time, stopped)
        say(end_summary(job, progress, stopped))
        if group.is_rank_0:
            callbacks.call("on_end", read_result(output))
            callbacks.raise_failure()
    return output


def load_job(
    engine: Engine,
    recipe: Recipe,
    record: RunRecord,
    start: Start | None,
    say: Say,
    *,
    fresh: bool,
    hooks: Hooks,
) -> tuple[Job, Progress]:
    """Assemble the job of a run, and restore its newest checkpoint. Collective."""
    group = engine.group
    group.run_on_rank_0(lambda: check_trackers(recipe.train.log_to))
    group.run_on_rank_0(lambda: check_measures(recipe.evaluation.measures))
    names = ", ".join(source.label for source in recipe.data.train_sources())
    say(f"loading {recipe.base.model} and the rows of {names}")
    job = build_job(recipe, engine, record.values, start, hooks)
    if fresh:  # not before: a recipe that cannot run must discard nothing
        group.run_on_rank_0(lambda: discard(job.output))
    return job, job.checkpoints.restore(engine) or Progress()


def begin_training(job: Job, progress: Progress, record: RunRecord, why: str, say: Say) -> None:
    """Record that a run starts here, or goes on, and say how. Collective."""
    group = job.engine.group
    longer = group.run_on_rank_0(lambda: go_on(job, record, progress))
    ranks = group.all_gather(job.engine.layout())
    group.run_on_rank_0(lambda: record_start(record, job, ranks, why))
    say(start_summary(job, progress, ranks, why, longer))


def train_loop(
    job: Job,
    batches: Prefetcher,
    progress: Progress,
    report: Report | NullReport,
    stop: StopRequest,
    callbacks: Callbacks,
    saves: SaveSchedule,
) -> str | None:
    """Evaluate, save and step, until the last step or early stopping. Returns why a callback stopped it, or None.

    Raises:
        TemporaryFailure: a signal stopped the run. A checkpoint of the last step is saved. An error of a callback
        likewise.
    """
    group = job.engine.group
    while True:
        improved = evaluation_is_due(job, progress) and evaluate(job, progress, report, stop, callbacks)
        interrupted = evaluation_is_due(job, progress)  # a signal ended it, and the resumed run repeats it
        done = not interrupted and (progress.step >= job.total_steps or stops_early(job.recipe, progress))
        # added up over all ranks, because all must save or stop after the same step
        wishes = saves.is_due(progress.step), stop.is_requested(), callbacks.has_ended
        due, stopping, ended = map(bool, group.all_reduce_sum(*wishes))
        if progress.step and (due or done or improved or stopping or ended):
            job.engine.set_phase(f"step {progress.step}: saving")
            folder = job.checkpoints.save(job.engine, progress)
            saves.record_save()
            if folder is not None:
                callbacks.call("on_checkpoint", folder)
            ended = group.any(callbacks.has_ended)
        if ended:
            group.run_on_all(callbacks.raise_failure)
        if done:
            return None
        if ended:
            reason = group.run_on_rank_0(lambda: callbacks.stopped)
            return f"after step {progress.step} of {job.total_steps}: {reason}"
        if stopping:
            signal_name = next(filter(None, group.all_gather(stop.signal_name)))
            saved = f"saved after step {progress.step}" if progress.step else "before the first step"
            raise TemporaryFailure(f"{signal_name}: {saved}; the same command goes on from there")
        train_step(job, batches, progress, report, callbacks)


def train_step(
    job: Job, batches: Prefetcher, progress: Progress, report: Report | NullReport, callbacks: Callbacks
) -> None:
    """Run one optimizer step, add it to `progress` and `report`, and call the callbacks.

    Raises:
        RunError: the loss or gradient is not finite, or an adapter tensor never gets a gradient.
    """
    start_time = time.perf_counter()
    job.engine.set_phase(f"step {progress.step + 1}")
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
    seconds = time.perf_counter() - start_time
    report.step(progress.step, result, seconds)
    numbers = result.loss, result.learning_rate, result.grad_norm, result.num_tokens, result.num_label_tokens
    callbacks.call("on_step", Step(progress.step, *numbers, seconds, result.metrics))
    if progress.step >= min(MAX_STEPS_WITHOUT_GRADIENT, job.total_steps):
        check_gradients(job, progress)


def check_gradients(job: Job, progress: Progress) -> None:
    """Raise RunError, which names the tensors, unless every adapter tensor has had a gradient. Collective."""
    names = job.engine.tensors_without_gradient()
    if names:
        raise RunError(
            f"{len(names)} adapter tensors have had no gradient after {progress.step} steps, so they cannot learn:"
            f" {', '.join(names[:4])}. Leave their layers out with adapter.exclude"
        )


def evaluation_is_due(job: Job, progress: Progress) -> bool:
    """True before the first step, every `eval_every_steps`, and after the last step. Once for each of these steps."""
    if job.eval_batches is None or progress.evaluated_step == progress.step:
        return False
    return progress.step % job.recipe.train.eval_every_steps == 0 or progress.step >= job.total_steps


def evaluate(
    job: Job, progress: Progress, report: Report | NullReport, stop: StopRequest, callbacks: Callbacks
) -> bool:
    """Write the held-out loss and measures of this step into `progress`. True: save a checkpoint, as the new best.

    Raises:
        RunError: the loss is not finite.
    """
    sampler = job.eval_batches
    assert sampler is not None
    job.engine.set_phase(f"step {progress.step}: held-out rows")
    result = job.engine.evaluate(sampler.eval_micro_batches(), stop.is_requested)
    if result is None:
        return False
    loss = result.loss
    measures: dict[str, float] = {}
    if not math.isfinite(loss):
        raise RunError(
            f"step {progress.step}: the held-out loss is {loss}; look at the rows of data.eval, or lower"
            " train.learning_rate. Checkpoints are kept"
        )
    if job.answers is not None and job.answers.are_due(progress.step, job.total_steps):
        generated = job.answers.measure(job.engine, progress.step, stop.is_requested)
        if generated is None:
            return False
        measures = generated
        result = replace(result, metrics={**result.metrics, **measures})
    by_source = {name: report.loss for name, report in result.by_source.items()}
    improved = progress.add_evaluation(loss, measures, job.recipe.evaluation.best, by_source)
    report.evaluation(progress.step, result)
    callbacks.call("on_evaluation", Evaluation(progress.step, loss, result.metrics))
    return improved


def explain_non_finite(job: Job, progress: Progress, problem: NonFiniteStep) -> str:
    """Return the error message of a step that is not finite: where, which rows, and what to do."""
    rows = job.batches.rows
    named = ", ".join(rows.location(row) for row in problem.rows[:SHOWN_ROWS])
    more = f" and {len(problem.rows) - SHOWN_ROWS} more" if len(problem.rows) > SHOWN_ROWS else ""
    newest = job.checkpoints.newest()
    checkpoint = f"The checkpoint after step {newest[0].step} is kept" if newest else "No checkpoint was due yet"
    return (
        f"step {progress.step + 1}: {problem} (learning rate {job.recipe.train.learning_rate:g});"
        " nothing was updated.\n"
        f"  Rows in it: {named}{more}.\n  {checkpoint}. Look at these rows, or lower train.learning_rate"
    )


def open_output_folder(output: Path, settings: dict[str, Any], resources: ExitStack, *, fresh: bool) -> RunRecord:
    """Lock the output folder until `resources` closes, delete staging files of dead processes, and open its record."""
    resources.enter_context(locked(output))
    for folder in (output, output / "checkpoints"):
        sweep_folder(folder)
    return open_record(output, settings, fresh=fresh)


def record_start(record: RunRecord, job: Job, ranks: list[dict[str, Any]], why: str) -> None:
    """Write the facts of this start into run.json. `ranks`: the layouts of all ranks."""
    record.start(
        data=job.data_facts(),
        base=job.base_facts(),
        dtype=job.dtype.name,
        dtype_why=job.dtype.why,
        engine=ranks[0],
        ranks=ranks[1:],
        total_steps=job.total_steps,
        fused=job.adapted.fused.facts() if job.adapted.fused else {},
        **({"start": job.start.facts()} if job.start else {}),
        **({"auto": why} if why else {}),
        **({"own_objective": True} if job.own_objective else {}),
        **({"answers": job.answers.facts()} if job.answers else {}),
    )


def print_nothing(text: str) -> None:
    """Print nothing: only rank 0 prints."""
