"""Call the caller's own Python code during a run: an object with any of the methods of `Callback`.

Invariant: a run never calls less than it was given. A method with the name of no event is refused before training.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, final

from lorakit.errors import LorakitError, did_you_mean

if TYPE_CHECKING:  # so that the process that only launches others imports no torch
    from torch import nn

    from lorakit.recipe import Recipe
    from lorakit.run.result import TrainResult

EVENTS: Final = ("on_start", "on_step", "on_evaluation", "on_checkpoint", "on_end")


class StopTraining(Exception):
    """Raised or returned by a callback: end the run after this step, with a checkpoint and a patch.

    Its text is the reason, for the summary, run.json and the result.
    """


@dataclass(frozen=True)
class RunStart:
    """The run that begins or goes on. `model`: the base with its adapter, to read and to generate with; changing
    it changes the run, but each module is in its own mode again after a callback."""

    output: Path
    recipe: "Recipe"
    model: "nn.Module"
    step: int
    """steps that were trained before this start"""
    total_steps: int

    def __repr__(self) -> str:
        return f"RunStart({str(self.output)!r}, step {self.step} of {self.total_steps})"


@dataclass(frozen=True)
class Step:
    """One optimizer step, over all processes. `number` counts from 1; the rest is as in metrics.jsonl."""

    number: int
    loss: float
    learning_rate: float
    grad_norm: float
    """before clipping"""
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


class Callback(Protocol):
    """The events of a run. An object needs only the methods that it uses; each is called in the order of events.

    Called in the process that writes the files (rank 0). Every method may return or raise `StopTraining`.
    """

    def on_start(self, run: RunStart) -> Any:
        """Handle the start: everything is loaded, and no step of this start is trained."""

    def on_step(self, step: Step) -> Any:
        """Handle an optimizer step."""

    def on_evaluation(self, evaluation: Evaluation) -> Any:
        """Handle an evaluation. The one of step 0 is of the base, or of the patch that the run started from."""

    def on_checkpoint(self, folder: Path) -> Any:
        """Handle a new checkpoint, which is a patch."""

    def on_end(self, result: "TrainResult") -> Any:
        """Handle the end of a run that finished or was stopped by a callback; not after an error or a signal."""


def check_callbacks(callbacks: object) -> tuple[object, ...]:
    """Return the callbacks as a tuple, if a run can call each.

    Raises:
        LorakitError: not a list, or an object without a method of an event, or with one of an unknown name or of other
        parameters than one.
    """
    if callbacks is None:
        return ()
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise LorakitError(
            f"callbacks: a list of objects with methods such as on_step, got a {type(callbacks).__name__}"
        )
    for callback in callbacks:
        kind = callback.__name__ if isinstance(callback, type) else type(callback).__name__
        if isinstance(callback, type):
            raise LorakitError(f"callbacks: {kind} is a class; give an object of it: {kind}()")
        names = [name for name in dir(callback) if name.startswith("on_") and callable(getattr(callback, name))]
        for name in names:
            if name not in EVENTS:
                raise LorakitError(
                    f"callbacks: {kind}.{name} would never be called; the events are {', '.join(EVENTS)}."
                    f"{did_you_mean(name, EVENTS)}"
                )
            check_parameters(getattr(callback, name), 1, f"callbacks: {kind}.{name}")
        if not names:
            raise LorakitError(f"callbacks: {kind} has none of the methods {', '.join(EVENTS)}")
    return tuple(callbacks)


def check_parameters(function: Any, number: int, name: str) -> None:
    """Return if a function can be called with so many values, as far as Python can tell.

    Raises:
        LorakitError: it cannot.
    """
    try:
        parameters = inspect.signature(function)
    except (TypeError, ValueError):  # of a builtin
        return
    try:
        parameters.bind(*range(number))
    except TypeError as problem:
        values = "1 value" if number == 1 else f"{number} values"
        raise LorakitError(f"{name}{parameters} is called with {values}: {problem}") from None


@contextmanager
def own_modes(model: "nn.Module | None") -> Iterator[None]:
    """Return each module of a model to its own mode after the block, training or evaluation."""
    modes = [] if model is None else [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@final
class Callbacks:
    """The callbacks of one run, in this process; processes above rank 0 have none.

    `stopped`: why a callback stopped the run. `failure`: the error of a callback. None: neither happened.
    """

    def __init__(self, callbacks: Sequence[object] = ()) -> None:
        self._callbacks = callbacks
        self.stopped: str | None = None
        self.failure: Exception | None = None
        self._model: nn.Module | None = None

    @property
    def has_ended(self) -> bool:
        """True if the run ends after this step."""
        return self.stopped is not None or self.failure is not None

    def call(self, event: str, value: Any) -> None:
        """Call a method of every callback that has it. After an error no method is called any more.

        A callback may switch the model to evaluation, to generate. Each module is in its own mode again after it.
        """
        if isinstance(value, RunStart):
            self._model = value.model
        if self.failure is None and any(hasattr(callback, event) for callback in self._callbacks):
            with own_modes(self._model):
                self._call(event, value)

    def _call(self, event: str, value: Any) -> None:
        for callback in self._callbacks:
            method = getattr(callback, event, None)
            if method is None:
                continue
            where = f"{type(callback).__name__}.{event}"
            try:
                answer = method(value)
            except StopTraining as request:
                answer = request
            except Exception as problem:  # raised once the state is saved
                left = "the run has ended" if event == "on_end" else "the same call goes on with the run"
                problem.add_note(f"raised by {where}, a callback of lorakit.train; {left}")
                self.failure = problem
                return
            if answer is StopTraining or isinstance(answer, StopTraining):
                reason = str(answer) if isinstance(answer, StopTraining) else ""
                self.stopped = self.stopped or f"by {where}" + (f": {reason}" if reason else "")
            elif answer is not None:
                self.failure = LorakitError(
                    f"callbacks: {where} returned {answer!r}; return None, or lorakit.StopTraining to stop the run"
                )
                return

    def raise_failure(self) -> None:
        """Raise the error of a callback, with its own traceback."""
        if self.failure is not None:
            raise self.failure
