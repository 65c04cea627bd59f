"""Train with workers that leave and join: the rounds of `loop.py`, each of them with the workers that are there.

Invariant: a round that a lost worker broke is repeated from the state that its members share. The rows of a step depend
on its number alone, and those present cut them among themselves, so no row is lost or repeated. Rank 0, the worker
that has been there longest, has the output folder; its successor opens the folder when it is gone.
"""

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, final

from lorakit.data import Prefetcher
from lorakit.errors import RunError, TemporaryFailure
from lorakit.files.atomic import disk_full_as_retryable
from lorakit.launch.watchdog import is_collective_error
from lorakit.parallel import Engine
from lorakit.parallel.elastic import ElasticEngine, Meeting
from lorakit.parallel.engine import LossReport, StepReport
from lorakit.parallel.group import disagreements
from lorakit.parallel.setup import shared_facts
from lorakit.recipe import Recipe
from lorakit.run.lock import locked
from lorakit.run.metrics import read_metrics
from lorakit.run.record import RunRecord, flatten, open_record
from lorakit.run.report import NullReport, Report, reporting
from lorakit.run.signals import StopRequest
from lorakit.training.callbacks import Callbacks
from lorakit.training.finish import finish, verify_finished_run
from lorakit.training.hooks import Hooks
from lorakit.training.job import Job, choose_start
from lorakit.training.loop import End, Say, begin_training, load_job, open_output_folder, print_nothing, train_round
from lorakit.training.progress import Progress
from lorakit.training.summary import end_summary


@final
class Numbers(NullReport):
    """The newest numbers, which every worker has, and the report of the one that writes them.

    The metrics may lack a step where rank 0 was lost, or has its state from a worker that was ahead.
    """

    def __init__(self) -> None:
        self.report: Report | NullReport | None = None
        self._step: tuple[int, StepReport, float] | None = None
        self._evaluation: tuple[int, LossReport] | None = None

    def step(self, number: int, report: StepReport, seconds: float) -> None:
        self._step = number, report, seconds
        if self.report is not None:
            self.report.step(number, report, seconds)

    def evaluation(self, number: int, report: LossReport) -> None:
        self._evaluation = number, report
        if self.report is not None:
            self.report.evaluation(number, report)

    def facts(self) -> dict[str, Any]:
        """Return the newest numbers as JSON has them."""
        step, evaluation = self._step, self._evaluation
        return {
            "step": step and (step[0], asdict(step[1]), step[2]),
            "evaluation": evaluation and (evaluation[0], asdict(evaluation[1])),
        }

    def fill_in(self, facts: Mapping[str, Any], output: Path, last_step: int) -> None:
        """Report those of a worker's newest numbers that the metrics of a run lack. last_step: of the run."""
        lines = read_metrics(output / "metrics.jsonl")
        steps, evaluations = ({line["step"] for line in lines if key in line} for key in ("loss", "eval_loss"))
        if facts["step"] and facts["step"][0] == last_step and last_step not in steps:
            number, values, seconds = facts["step"]
            self.step(number, StepReport(**values), seconds)
        if facts["evaluation"] and facts["evaluation"][0] == last_step and last_step not in evaluations:
            number, values = facts["evaluation"]
            by_source = {name: LossReport(**part) for name, part in values["by_source"].items()}
            self.evaluation(number, LossReport(**values | {"by_source": by_source}))


@dataclass
class ElasticRun:
    """What one worker has of a run. `workers`: those of the present group, by number."""

    engine: ElasticEngine
    job: Job
    progress: Progress
    record: RunRecord
    stop: StopRequest
    resources: ExitStack
    """of the worker that has the output folder: its lock, display and metrics"""
    start_time: float
    batches: Prefetcher
    workers: tuple[int, ...]
    numbers: Numbers = field(default_factory=Numbers)

    @property
    def settings(self) -> dict[str, Any]:
        """The recipe as it is recorded."""
        return self.job.recipe.model_dump(mode="json")

    @property
    def has_folder(self) -> bool:
        """True if this worker has the output folder."""
        return self.numbers.report is not None

    def open_report(self) -> None:
        """Display the run here, and append to its metrics."""
        self.numbers.report = self.resources.enter_context(
            reporting(
                self.job.output,
                last_step=self.progress.step,
                total_steps=self.job.total_steps,
                log_to=self.job.recipe.train.log_to,
                config=flatten(self.settings),
            )
        )


def run_elastically(
    engine: Engine, recipe: Recipe, stop: StopRequest, *, fresh: bool, why: str, say: Say, hooks: Hooks
) -> Path:
    """Carry out `loop.run` as one worker of an elastic run. Returns the folder of the patch.

    Raises:
        LorakitError: as `loop.run`.
    """
    assert isinstance(engine, ElasticEngine)
    output = Path(recipe.output)
    with disk_full_as_retryable(output), ExitStack() as resources:
        run = _assemble(engine, recipe, stop, resources, fresh=fresh, why=why, say=say, hooks=hooks)
        if run is None:
            return output
        stop.defer()  # from here on the loop handles signals, after the step they interrupt
        resources.callback(lambda: run.batches.close())
        end = _train(run)
        if run.has_folder:
            say(end_summary(run.job, run.progress, end.why))
    return output


def _assemble(
    engine: ElasticEngine,
    recipe: Recipe,
    stop: StopRequest,
    resources: ExitStack,
    *,
    fresh: bool,
    why: str,
    say: Say,
    hooks: Hooks,
) -> ElasticRun | None:
    """Load everything and restore the newest checkpoint; None if the run has finished. Collective, but where it joins.

    The workers that a run starts with do this together, as those of any run. One that joins does it alone.
    """
    group, output, start_time = engine.group, Path(recipe.output), time.monotonic()
    writes = group.is_rank_0 and not engine.joins
    start = group.run_on_rank_0(lambda: choose_start(recipe, fresh=fresh))
    recipe = start.apply(recipe) if start else recipe
    settings = recipe.model_dump(mode="json")

    def open_folder() -> RunRecord:
        if engine.joins:
            return open_record(output, settings, fresh=False)
        return open_output_folder(output, settings, resources, fresh=fresh)

    record = group.run_on_rank_0(open_folder)
    if record.finished:
        if writes:
            verify_finished_run(recipe, output, say)
        return None
    say = say if writes else print_nothing
    job, progress = load_job(engine, recipe, record, start, say, fresh=fresh and not engine.joins, hooks=hooks)
    batches = Prefetcher(job.batches, job.total_steps)
    workers = () if engine.joins else tuple(range(group.size))
    run = ElasticRun(engine, job, progress, record, stop, resources, start_time, batches, workers)
    if engine.joins:
        return run
    begin_training(job, progress, record, why, say)
    if writes:
        run.open_report()
    return run


def _train(run: ElasticRun) -> End:
    """Repeat rounds with the workers that are there until the run ends, and write its results."""
    while True:
        try:
            try:
                meeting = run.engine.meet(run.progress.step, run.stop.is_requested)
            except TemporaryFailure as problem:
                raise TemporaryFailure(f"{problem}; {_save_alone(run)}") from None
            if meeting is not None:
                _agree(run, meeting)
            end = train_round(run.job, run.batches, run.progress, run.numbers, run.stop, Callbacks())
            if end is not None:
                finish(run.job, run.progress, run.record, time.monotonic() - run.start_time, end.why)
                return end
        except RuntimeError as problem:
            if not is_collective_error(problem):
                raise
            run.engine.disband()


def _agree(run: ElasticRun, meeting: Meeting) -> None:
    """Share one state with a new group, and cut the rows among its members. Collective.

    Raises:
        RunError: recipe, versions, rows or base of this process are not those of the run.
    """
    engine, job = run.engine, run.job
    facts = shared_facts(job.recipe) | flatten({"data": job.data_facts(), "base": job.base_facts()})
    own = json.dumps({"facts": facts, "progress": asdict(run.progress), "numbers": run.numbers.facts()})
    theirs = json.loads(engine.share(meeting.source, own))
    if differing := disagreements([theirs["facts"], json.loads(own)["facts"]]):
        raise RunError(
            "this process cannot join the run, which began with other facts (its first, this one's second):\n"
            + "\n".join(f"  {line}" for line in differing)
        )
    run.progress = Progress(**theirs["progress"])
    data = engine.mesh.data
    eval_batches = job.eval_batches and replace(job.eval_batches, rank=data.rank, num_ranks=data.size)
    batches = replace(job.batches, rank=data.rank, num_ranks=data.size)
    run.job = replace(job, batches=batches, eval_batches=eval_batches)
    run.batches.close()
    run.batches = Prefetcher(run.job.batches, job.total_steps)
    before, now = set(run.workers), set(meeting.workers)
    run.workers = meeting.workers
    if not engine.group.is_rank_0:
        return
    if not run.has_folder:
        run.record = open_output_folder(job.output, run.settings, run.resources, fresh=False)
        run.open_report()
    run.numbers.fill_in(theirs["numbers"], job.output, run.progress.step)
    if before != now:
        change = {"left": sorted(before - now), "joined": sorted(now - before)}
        run.record.add_change({"step": run.progress.step, "processes": data.size, **change})


def _save_alone(run: ElasticRun) -> str:
    """Save a checkpoint of a run that cannot go on, unless another worker does. Returns a clause about it."""
    run.engine.disband()
    step = run.progress.step
    if step == 0:
        return "no step was trained"
    with ExitStack() as resources, suppress(RunError):  # another worker has the folder: it has the same state and saves
        if not run.has_folder:
            resources.enter_context(locked(run.job.output))
        run.job.checkpoints.save(run.engine, run.progress)
    return f"saved after step {step}; the same command goes on from there"
