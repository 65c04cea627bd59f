"""Python objects of the caller that a run uses: callbacks, metrics, an objective. A recipe names none, as it is data.

Invariant: a run never calls less than it was given. A method with the name of no event is refused when its class is
defined.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from lorakit.errors import LorakitError, RunError, did_you_mean

if TYPE_CHECKING:  # so that the process that only launches others imports no torch
    from torch import nn

    from lorakit.objectives.objective import Objective
    from lorakit.recipe import Recipe
    from lorakit.run.facts import TrainResult


class StopTraining(Exception):
    """Raised by a callback to end the run after this step, with checkpoint and patch. Its text is the reason."""


@dataclass(frozen=True)
class RunStart:
    """The run that begins or goes on."""

    output: Path
    recipe: "Recipe" = field(repr=False)
    model: "nn.Module" = field(repr=False)
    """the base with its adapter, to read and to generate with. Changing it changes the run, but each module is in its
    own mode again after a callback"""
    step: int  # steps that were trained before this start
    total_steps: int


@dataclass(frozen=True)
class Step:
    """One optimizer step, over all processes. `number` counts from 1; the rest is as in metrics.jsonl."""

    number: int
    loss: float
    learning_rate: float
    grad_norm: float  # before clipping
    tokens: int
    label_tokens: int
    seconds: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Evaluation:
    """One evaluation on the held-out rows, after step `step`. `metrics`: accuracy, and measures of answers."""

    step: int
    loss: float
    metrics: Mapping[str, float]


class Callback:
    """Base class of callbacks: override events, called in this order on rank 0. Each may raise `StopTraining`."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for name in vars(cls):
            if name.startswith("on_") and not hasattr(Callback, name):
                events = [event for event in vars(Callback) if event.startswith("on_")]
                raise LorakitError(
                    f"{cls.__name__}.{name} would never be called; the events are {', '.join(events)}."
                    f"{did_you_mean(name, events)}"
                )

    def on_start(self, run: RunStart) -> None:
        """Handle the start: everything is loaded, and no step of this start is trained."""

    def on_step(self, step: Step) -> None:
        """Handle an optimizer step."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Handle an evaluation. The one of step 0 is of the base, or of the patch that the run started from."""

    def on_checkpoint(self, folder: Path) -> None:
        """Handle a new checkpoint, which is a patch."""

    def on_end(self, result: "TrainResult") -> None:
        """Handle the end of a run that finished or was stopped by a callback; not after an error or a signal."""


@final
@dataclass(eq=False)
class Callbacks:
    """The callbacks of one run; only rank 0 has any."""

    callbacks: Sequence[Callback]
    model: "nn.Module"
    stopped: str | None = None  # why one stopped the run
    failure: Exception | None = None  # the error of one

    @property
    def has_ended(self) -> bool:
        return self.stopped is not None or self.failure is not None

    def call(self, event: str, value: Any) -> None:
        """Call a method of every callback, up to the first error. Module modes, such as evaluation, are restored."""
        for callback in self.callbacks:
            if self.failure is not None:
                return
            where = f"{type(callback).__name__}.{event}"
            with restored_modes(self.model):
                try:
                    getattr(callback, event)(value)
                except StopTraining as request:
                    self.stopped = self.stopped or f"by {where}" + (f": {request}" if str(request) else "")
                except Exception as problem:  # raised once the state is saved
                    left = "the run has ended" if event == "on_end" else "the same call goes on with the run"
                    problem.add_note(f"raised by {where}, a callback of lorakit.train; {left}")
                    self.failure = problem

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure


@contextmanager
def restored_modes(model: "nn.Module") -> Iterator[None]:
    """Return each module of a model to its own mode after the block, training or evaluation."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@dataclass(frozen=True)
class Hooks:
    """What `lorakit.train` was given besides a recipe."""

    callbacks: tuple[Callback, ...] = ()
    metrics: Mapping[str, Callable[[str, str], float]] = field(default_factory=dict)  # of (predicted, expected)
    objective: "Objective | None" = None  # what the run minimises, instead of the recipe's
    metric_files: tuple[str, ...] = ()  # FILE:FUNCTION of each metric of a command line, for launched processes

    def check_answers(self, recipe: "Recipe") -> None:
        """Raise RunError if there are measures and a recipe has no answers, or its best step needs another measure."""
        if self.metrics and recipe.train.eval_generate is None:
            raise RunError("metrics: they measure answers, and nothing is generated; set train.eval_generate")
        own = recipe.evaluation.own_best
        if own is not None and own not in self.metrics:
            raise RunError(
                f"evaluation.best: {own} is no metric of this call (there are: {', '.join(self.metrics) or 'none'})."
                f"{did_you_mean(own, self.metrics)} Name the function: --metric FILE.py:{own} (metrics= in Python)"
            )

    def check_launch(self, processes: int) -> None:
        """Raise RunError, which names the remedy, unless processes that a command starts can have all of it."""
        names = [name for name in ("callbacks", "objective") if getattr(self, name)]
        names += ["metrics"] if self.metrics and not self.metric_files else []
        if names:
            raise RunError(
                f"{', '.join(names)}: objects of this process, and this call would start {processes} others without"
                f" them. Start your script in all of them (torchrun --nproc-per-node {processes} SCRIPT), or set"
                " parallel.backend: single"
            )


NO_HOOKS: Final = Hooks()


def check_hooks(callbacks: object, metrics: object, objective: object) -> Hooks:
    """Return the hooks of a call. Raises LorakitError, with the form to give: an argument of another type."""
    callbacks = () if callbacks is None else callbacks
    if not isinstance(callbacks, Sequence) or not all(isinstance(one, Callback) for one in callbacks):
        raise LorakitError(f"callbacks: a list of objects of classes derived from lorakit.Callback, got {callbacks!r}")
    if metrics is not None and not (
        isinstance(metrics, Mapping) and all(isinstance(name, str) and callable(metrics[name]) for name in metrics)
    ):
        raise LorakitError(f"metrics: a mapping of names to functions (predicted, expected) -> number, got {metrics!r}")
    if objective is not None:
        from lorakit.objectives.objective import Objective

        if not isinstance(objective, Objective):
            raise LorakitError(
                f"objective: a lorakit.Objective, got {objective!r}; by name **{{'objective.name': ...}}"
            )
    return Hooks(tuple(callbacks), metrics or {}, objective)
