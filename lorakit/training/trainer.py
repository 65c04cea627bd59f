"""Take a run through its steps, and do what is due before the first, and between two: evaluate, save, stop.

Invariant: `run.progress` and the recipe alone decide what happens after a step, so a run that was stopped anywhere and
resumed ends in the same bytes as one that was not.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, final

import numpy as np
import torch

from lorakit.data.batch import Batch
from lorakit.data.dataset import MismatchedRows
from lorakit.data.sampler import BatchSampler
from lorakit.errors import RunError, TemporaryFailure
from lorakit.files.atomic import write_file
from lorakit.files.safetensors import file_parts, open_tensors
from lorakit.files.text import Say, first_of
from lorakit.launch.interrupts import StopRequest
from lorakit.objectives.objective import SFT
from lorakit.parallel import NonFiniteStep, StepReport
from lorakit.run.display import Report, reporting
from lorakit.run.record import START_OVER
from lorakit.training.callbacks import Callbacks, Evaluation, RunStart, Step
from lorakit.training.checkpoint import EvaluationResult
from lorakit.training.output import no_gain
from lorakit.training.run import Run

MAX_STEPS_WITHOUT_GRADIENT: Final = 20  # by this step every adapter tensor must have had one
MAX_DEAD_STEPS: Final = 20  # in a row
LEARNED_LOSS: Final = 0.01  # below it a gradient may underflow to zero because nothing is left to learn
SHOWN_ROWS: Final = 8
REFERENCES: Final = "references.safetensors"
References = dict[str, np.ndarray]
"""`train` or `eval`, with `/mismatched` of others' answers -> log p of each row's labels, (rows,) float32"""


def add_references(run: Run, say: Say) -> None:
    """Give the run's batches the log p of each row as the run starts, computed now or read. Collective.

    Objectives of pairs compare with these. They are computed once, before the first step, and stored beside the
    checkpoints: a run that goes on has another adapter. An untrained adapter changes nothing, so without
    `adapter.start_from` they are the base's.
    Raises RunError: one is not finite, or those of an interrupted run are gone.
    """
    objective = run.loss_model.objective
    has_mismatched = objective.first_pass is not None and objective.first_pass.mismatched
    if not (objective.reads_references or has_mismatched):
        return
    group = run.engine.group
    path = run.checkpoints.folder / REFERENCES
    start = run.inputs.start
    samplers = dict(run.batches)
    if has_mismatched:
        others = {name: replace(each, rows=MismatchedRows(each.rows)) for name, each in run.batches.items()}
        samplers |= {f"{name}/mismatched": each for name, each in others.items()}
    of = {name: batches.rows.digest for name, batches in samplers.items()} | (start.facts() if start else {})
    facts = {name: str(value) for name, value in of.items()}
    references = group.run_on_rank_0(lambda: _read_references(path, facts))
    if references is None:
        if run.progress.step:
            raise RunError(f"{path}: is gone, and the model is no longer that of the run's start; {START_OVER}")
        num_rows = sum(len(batches.rows) for batches in samplers.values())
        say(f"computing log p of {num_rows:,} answers once, with which the objective compares")
        run.engine.set_phase("computing log p of the rows at the run's start")
        references = {name: _compute_references(run, batches) for name, batches in samplers.items()}
        computed = references
        group.run_on_rank_0(lambda: _write_references(path, computed, facts))
    referring = {name: replace(batches, references=references[name]) for name, batches in samplers.items()}
    for name in run.batches:
        run.batches[name] = replace(referring[name], mismatched=referring.get(f"{name}/mismatched"))


def _compute_references(run: Run, batches: BatchSampler) -> np.ndarray:
    values = run.engine.score(batches.eval_micro_batches(), len(batches.rows))
    if not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values))[0])
        raise RunError(f"{batches.rows.location(row)}: log p of the answer is {values[row]} before training")
    return values


def _write_references(path: Path, references: References, facts: dict[str, str]) -> None:
    tensors = {name: torch.from_numpy(values) for name, values in references.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, b"".join(file_parts(tensors, facts)))


def _read_references(path: Path, facts: dict[str, str]) -> References | None:
    """Return stored references; None if there are none, or those of other rows or of another start."""
    if not path.is_file():
        return None
    file = open_tensors(path)
    return {name: file.read(name).numpy() for name in file.entries} if file.metadata == facts else None


@contextmanager
def training(run: Run, stop: StopRequest, callbacks: Callbacks, clock: Callable[[], float]) -> Iterator["Trainer"]:
    """Yield a run's trainer; metrics, display and threads end with the block. Raises RunError: a step is not finite."""
    opened = reporting(run.recipe, last_step=run.progress.step, total_steps=run.total_steps)
    with opened if run.engine.group.is_rank_0 else nullcontext() as report:  # the other ranks have the same numbers
        stop.defer()  # from here on signals are handled after the step that they interrupt
        start = RunStart(run.output, run.recipe, run.loss_model.model, run.progress.step, run.total_steps)
        callbacks.call("on_start", start)
        # a run goes on where its checkpoint ends
        trainer = Trainer(run, report, stop, callbacks, clock, clock(), saved_step=run.progress.step)
        stop.answer = trainer.answer_signal if run.engine.group.is_rank_0 else None
        try:
            yield trainer
        except NonFiniteStep as problem:
            named = first_of([run.inputs.datasets["train"].location(row) for row in problem.rows], SHOWN_ROWS)
            raise RunError(
                f"step {run.progress.step + 1}: {problem} (learning rate {run.recipe.train.learning_rate:g}); nothing"
                f" was updated.\n  Rows in it: {named}.\n  {_newest_checkpoint(run)}. Look at these rows, or"
                " lower train.learning_rate"
            ) from None
    run.lost_lines = report.trackers.lost_lines() if report else {}


@final
@dataclass
class Trainer:
    """A run under way."""

    run: Run
    report: Report | None
    stop: StopRequest
    callbacks: Callbacks
    clock: Callable[[], float]
    saved_at: float  # `clock` at the last checkpoint or the start
    saved_step: int  # of the last checkpoint; 0 without one
    step_started: float = 0.0
    num_dead: int = 0  # steps in a row from which the adapter could not learn

    def answer_signal(self) -> str:
        """Return what a signal does now, and what a second Ctrl-C does."""
        later = f"going on from step {self.saved_step}" if self.saved_step else "beginning with the first step"
        return f"stopping after this step (Ctrl-C again: now, {later})"

    def steps(self) -> Iterator[tuple[int, Sequence[Batch]]]:
        """Yield each step that is left, counted from 0, with this rank's micro-batches; `record` its report.

        Before each step and after the last one, evaluate and save where that is due. Collective.
        Raises TemporaryFailure, once a checkpoint is saved: a signal stopped the run. An error of a callback likewise.
        """
        run = self.run
        while not self._ends_here():
            self.step_started = time.perf_counter()
            run.engine.set_phase(f"step {run.progress.step + 1}")
            yield run.progress.step, run.batches["train"].step(run.progress.step)

    def record(self, result: StepReport) -> None:
        """Add a step to progress and report. Raises RunError: all or a part of it cannot learn. Collective."""
        run = self.run
        progress = run.progress
        progress.step += 1
        progress.tokens += result.num_tokens
        progress.label_tokens += result.num_label_tokens
        seconds = time.perf_counter() - self.step_started
        if self.report:
            self.report.step(progress.step, result, seconds)
        numbers = result.loss, result.learning_rate, result.grad_norm, result.num_tokens, result.num_label_tokens
        self.callbacks.call("on_step", Step(progress.step, *numbers, seconds, result.metrics))
        is_due = progress.step >= min(MAX_STEPS_WITHOUT_GRADIENT, run.total_steps)
        if is_due and (names := run.engine.tensors_without_gradient()):
            raise RunError(
                f"{len(names)} adapter tensors have had no gradient after {progress.step} steps, so they cannot learn:"
                f" {', '.join(names[:4])}. Leave their layers out with adapter.exclude"
            )
        self._check_alive(result)

    def _check_alive(self, result: StepReport) -> None:
        """Raise RunError after MAX_DEAD_STEPS steps in a row with a zero gradient, or with equal logits everywhere."""
        # from the config, because a rank may have some of the embedding's rows, or none
        config = self.run.loss_model.model.config.get_text_config()  # type: ignore[union-attr, operator]
        has_equal_logits = math.isclose(result.loss, math.log(config.vocab_size), rel_tol=1e-6)
        has_no_gradient = result.grad_norm == 0 and result.loss > LEARNED_LOSS
        # another objective may have nothing left to do at any loss
        dead = self.run.loss_model.objective is SFT and (has_equal_logits or has_no_gradient)
        self.num_dead = self.num_dead + 1 if dead else 0
        if self.num_dead < MAX_DEAD_STEPS:
            return
        what = f"a gradient of norm {result.grad_norm:g}"
        if has_equal_logits:
            what += f" and the loss of a model whose logits are all equal, ln(vocabulary) = {result.loss:.4f}"
        raise RunError(
            f"step {self.run.progress.step}: the last {MAX_DEAD_STEPS} steps had {what}: the adapter has diverged and"
            f" learns nothing any more (learning rate {self.run.recipe.train.learning_rate:g}).\n"
            f"  {_newest_checkpoint(self.run)}. Lower train.learning_rate, and {START_OVER}"
        )

    def _ends_here(self) -> bool:
        """Evaluate and save where that is due. True if no step follows. Raises as `steps`."""
        run = self.run
        progress = run.progress
        group = run.engine.group
        improved = evaluation_is_due(run) and self._evaluate()
        interrupted = evaluation_is_due(run)  # a signal ended it, and the resumed run repeats it
        done = not interrupted and (progress.step >= run.total_steps or no_gain(run.recipe, progress) is not None)
        # by the clock of rank 0; added up over all ranks, because all must save or stop after the same step
        settings = run.recipe.train
        seconds = settings.save_every_seconds if group.is_rank_0 else None
        is_late = seconds is not None and self.clock() - self.saved_at >= seconds
        is_due = is_late or progress.step % settings.save_every_steps == 0
        wishes = is_due, self.stop.is_requested(), self.callbacks.has_ended
        due, stopping, ended = map(bool, group.all_reduce_sum(*wishes))
        if progress.step and (due or done or improved or stopping or ended):
            run.engine.set_phase(f"step {progress.step}: saving")
            folder = run.checkpoints.save(run.engine, run.patches, progress)
            self.saved_at = self.clock()
            self.saved_step = progress.step
            if folder is not None:
                self.callbacks.call("on_checkpoint", folder)
            ended = group.any(self.callbacks.has_ended)
        if ended:
            group.run_on_all(self.callbacks.raise_failure)
        if ended and not done:
            reason = group.run_on_rank_0(lambda: self.callbacks.stopped)
            run.stopped = f"after step {progress.step} of {run.total_steps}: {reason}"
        elif stopping and not done:
            signal_name = next(filter(None, group.all_gather(self.stop.signal_name)))
            saved = f"saved after step {progress.step}" if progress.step else "before the first step"
            raise TemporaryFailure(f"{signal_name}: {saved}; the same command goes on from there")
        return done or ended

    def _evaluate(self) -> bool:
        """Write the held-out loss and measures of this step into the progress. True: save it, as the new best step.

        Raises RunError: the loss is not finite.
        """
        run = self.run
        progress = run.progress
        stop = self.stop.is_requested
        run.engine.set_phase(f"step {progress.step}: held-out rows")
        result = run.engine.evaluate(run.batches["eval"].eval_micro_batches(), stop)
        if result is None:
            return False
        if not math.isfinite(result.loss):
            raise RunError(
                f"step {progress.step}: the held-out loss is {result.loss}; look at the rows of data.eval, or lower"
                " train.learning_rate. Checkpoints are kept"
            )
        objective = run.loss_model.objective
        measures = {name: result.metrics[name] for name in objective.measures if name in result.metrics}
        for source, report in result.by_source.items():
            own = {name: value for name, value in report.metrics.items() if name in objective.measures}
            measures |= {f"{name}/{source}": value for name, value in own.items()}
        if run.answers is not None and run.answers.are_due(progress.step, run.total_steps):
            generated = run.answers.measure(run.engine, progress.step, stop, progress.best_step)
            if generated is None:
                return False
            measures |= generated
            result = replace(result, metrics={**result.metrics, **measures})
        by_source = {name: report.loss for name, report in result.by_source.items()}
        now = EvaluationResult(progress.step, result.loss, by_source, measures)
        improved = progress.add_evaluation(now, run.recipe.evaluation)
        if self.report:
            self.report.evaluation(progress.step, result, has_perplexity=objective.has_perplexity)
        self.callbacks.call("on_evaluation", Evaluation(progress.step, result.loss, result.metrics))
        return improved


def evaluation_is_due(run: Run) -> bool:
    """True before the first step, every `eval_every_steps`, and after the last step. Once for each of these steps."""
    step = run.progress.step
    last = run.progress.last
    if "eval" not in run.batches or (last is not None and last.step == step):
        return False
    return step % run.recipe.train.eval_every_steps == 0 or step >= run.total_steps


def _newest_checkpoint(run: Run) -> str:
    newest = run.checkpoints.newest()
    return f"The checkpoint after step {newest[0].step} is kept" if newest else "No checkpoint was due yet"
