"""Train one adapter. The full run, from the recipe to the patch, to be read top to bottom."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from lorakit.files.text import Say
from lorakit.launch.environment import World
from lorakit.launch.interrupts import catching_signals
from lorakit.parallel.setup import distributed_engine
from lorakit.recipe import Recipe
from lorakit.run.facts import read_result
from lorakit.training.callbacks import NO_HOOKS, Callbacks, Hooks
from lorakit.training.output import begin, discard, finish, open_output, verify_finished_run
from lorakit.training.run import open_run, read_inputs
from lorakit.training.summary import as_text, end_summary, start_lines
from lorakit.training.trainer import add_references, training

PRINT: Final = partial(print, flush=True)  # because output into a pipe is buffered otherwise


def run(
    recipe: Recipe,
    world: World | None = None,
    *,
    fresh: bool = False,
    why: str = "",
    say: Say = PRINT,
    hooks: Hooks = NO_HOOKS,
    clock: Callable[[], float] = time.monotonic,
) -> Path:
    """Train a recipe's adapter, or resume it, in this process. Returns the folder of the patch.

    In a run of several processes, every process calls this function.

    world: this process's rank and group; None if no launcher started it. fresh: discard what the output folder
    contains, instead of resuming. why: the reason for the values that `auto` keys were given, for the record. say:
    prints the few lines before and after the run. clock: seconds, for train.save_every_seconds.
    Raises LorakitError: a problem that the user can solve. Checkpoints stay. An error of a callback likewise.
    TemporaryFailure: a signal stopped the run, or the disk is full. The same call resumes the run.
    """
    with (
        catching_signals() as stop,
        distributed_engine(recipe, world, stop.defer) as engine,
        open_output(recipe, engine.group, fresh=fresh) as output,
    ):
        group = engine.group
        say = say if group.is_rank_0 else lambda text: None
        if output.record.finished:
            group.run_on_rank_0(lambda: verify_finished_run(recipe, say))
            return Path(recipe.output)
        recipe = output.recipe
        recorded = output.record.values
        sources = ", ".join(source.label for source in recipe.data.train_sources())
        say(f"loading {recipe.base.model} and the rows of {sources}")
        inputs = read_inputs(recipe, group, recorded, output.start)
        run = open_run(engine, recipe, inputs, recorded, hooks)
        if fresh:  # not before: a recipe that cannot run must discard nothing
            group.run_on_rank_0(lambda: discard(run.output))
        run.progress = run.checkpoints.restore(engine, run.patches) or run.progress
        ranks, longer = begin(run, output.record, why)
        say("\n".join(map(as_text, start_lines(run, ranks, why, longer))))
        add_references(run, say)
        callbacks = Callbacks(hooks.callbacks if group.is_rank_0 else (), run.loss_model.model)
        with training(run, stop, callbacks, clock) as trainer:
            for step, micro_batches in trainer.steps():  # it evaluates, saves and stops between two
                trainer.record(engine.step(step, micro_batches))
        finish(run, output)
        say(end_summary(run, output))
        if group.is_rank_0:
            callbacks.call("on_end", read_result(run.output))
            callbacks.raise_failure()
    return run.output
