"""Go on with a run after its recipe got another end: more steps or epochs, another step to select, more patience."""

from lorakit.errors import RunError
from lorakit.run.record import RunRecord
from lorakit.training.finish import adapter_is_gone, deciding_measure, saved_adapter, stops_early
from lorakit.training.job import Job
from lorakit.training.progress import Progress
from lorakit.training.updates import rate_of


def check_length(before: int | None, total: int) -> None:
    """Return unless a run would be shorter than it was begun. before: its steps in run.json, None for a new run.

    Raises:
        RunError: it would.
    """
    if before is not None and total < before:
        raise RunError(
            f"train.steps, train.epochs: {before} steps before, {total} now; a run can be made longer, not shorter. Put"
            " the number back, choose another output, or start over with --fresh (in Python fresh=True)"
        )


def go_on(job: Job, record: RunRecord, progress: Progress) -> str | None:
    """Return what is different from now on in a run that was made longer; None in any other run. For rank 0 alone.

    progress: of the checkpoint from which the run goes on.

    Raises:
        RunError: the run cannot go on with the end that its recipe has now.
    """
    before, total, recipe = record.total_steps, job.total_steps, job.recipe
    check_length(before, total)
    if progress.step > total:  # of a run whose record lacks its steps
        raise RunError(
            f"{job.output}: its newest checkpoint is of step {progress.step}, and the recipe has {total} steps: it is"
            " that of another run. Put the number back, choose another output, or start over with --fresh (in Python"
            " fresh=True)"
        )
    if record.goes_on and progress.step == 0:
        raise RunError(
            f"{job.output}: this run finished and holds no state of its last step (checkpoints/), so it cannot go on."
            f" Start a new one from its patch: adapter.start_from: {job.output}, and another output"
        )
    best = progress.best_step
    if record.goes_on and best not in (None, progress.step) and saved_adapter(job, best) is None:
        raise RunError(adapter_is_gone(job, best))
    if before is None or total == before:
        return None
    if stops_early(recipe, progress):
        raise RunError(
            f"train.early_stopping_evals: {recipe.train.early_stopping_evals}: {deciding_measure(recipe)} was no better"
            f" in the last {progress.evals_without_gain} evaluations up to step {progress.step}, so no step of the"
            f" {total} would be trained; raise it, or set it to null"
        )
    last, following = rate_of(recipe, before)(max(0, progress.step - 1)), rate_of(recipe, total)(progress.step)
    step = progress.step
    return (
        f"{total} steps instead of {before}; the {recipe.train.schedule} schedule is that of {total} steps from now on:"
        f" learning rate {following:.2e} in step {step + 1}" + (f", {last:.2e} in step {step}" if step else "")
    )
