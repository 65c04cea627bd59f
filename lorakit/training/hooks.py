"""Python objects of the caller that a run uses. A recipe cannot name them, because it is data and no code."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from lorakit.errors import LorakitError, RunError
from lorakit.training.callbacks import check_callbacks, check_parameters

if TYPE_CHECKING:  # so that the process that only launches others imports no torch
    from lorakit.objectives.objective import Objective


@dataclass(frozen=True)
class Hooks:
    """What `lorakit.train` was given besides a recipe.

    callbacks: see `Callback`. metrics: name -> measure of an answer, (predicted, expected) -> number. objective: what
    the run minimises, instead of the recipe's. metric_files: FILE:FUNCTION of every metric, if a command line named
    them, so that launched processes load them too.
    """

    callbacks: tuple[object, ...] = ()
    metrics: Mapping[str, Callable[[str, str], float]] = field(default_factory=dict)
    objective: "Objective | None" = None
    metric_files: tuple[str, ...] = ()

    def check_answers(self, eval_generate: int | None) -> None:
        """Return unless there are measures of answers, and a recipe with this `train.eval_generate` has none.

        Raises:
            RunError: there are.
        """
        if self.metrics and eval_generate is None:
            raise RunError("metrics: they measure answers, and nothing is generated; set train.eval_generate")

    def check_launch(self, processes: int) -> None:
        """Return if processes that are started by a command can have all of it.

        Raises:
            RunError: names what cannot be passed on, and the remedy.
        """
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
    """Return the hooks of a call, if their types are right.

    Raises:
        LorakitError: names the argument, its value and the form to give.
    """
    if metrics is not None and not (
        isinstance(metrics, Mapping) and all(isinstance(name, str) and callable(metrics[name]) for name in metrics)
    ):
        raise LorakitError(f"metrics: a mapping of names to functions (predicted, expected) -> number, got {metrics!r}")
    for name, function in (metrics or {}).items():
        check_parameters(function, 2, f"metrics: {name}")
    if objective is None:
        return Hooks(check_callbacks(callbacks), metrics or {})
    from lorakit.objectives.objective import Objective

    if not isinstance(objective, Objective):
        raise LorakitError(
            f"objective: a lorakit.Objective, got {objective!r}; the recipe's section is given as"
            " **{'objective.name': ...}"
        )
    return Hooks(check_callbacks(callbacks), metrics or {}, objective)
