"""Values for the `auto` keys of a recipe: those of the run in its output folder, else those the plan advises."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from lorakit.errors import RunError
from lorakit.planning.estimate import Candidate, apply_changes
from lorakit.planning.machine import Machine
from lorakit.planning.plan import make_plan
from lorakit.recipe import Recipe
from lorakit.run.record import flatten, recorded_run

BACKEND: Final = "parallel.backend"
CHECKPOINTING: Final = "train.activation_checkpointing"


@final
@dataclass(frozen=True)
class Choice:
    """Values chosen for the `auto` keys of a recipe and its axes; empty for a recipe without such keys."""

    values: Mapping[str, Any]
    """Recipe key -> value."""
    why: str
    """One clause for each key, for the summary and run.json."""

    def apply(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the chosen values."""
        return apply_changes(recipe, self.values)


def resolve_auto(recipe: Recipe, machine: Machine | None = None, *, fresh: bool) -> Choice:
    """Choose values for the `auto` keys of a recipe. A resumed run gets the values it was started with.

    machine: None for this one.

    Raises:
        RunError: nothing fits; names the change that would help.
    """
    auto_keys = recipe.auto_keys
    if not auto_keys:
        return Choice({}, "")
    recorded = {} if fresh else flatten(recorded_run(Path(recipe.output)).get("recipe", {}))
    if recorded.get("parallel.processes") == recipe.parallel.processes and recorded.keys() >= set(auto_keys):
        values = {key: recorded[key] for key in auto_keys}
        if BACKEND in auto_keys:
            axes = {f"parallel.{axis}": recorded.get(f"parallel.{axis}", 1) for axis in recipe.parallel.axes}
            values |= {key: ranks for key, ranks in axes.items() if ranks > 1}
        return Choice(values, f"{', '.join(map(_shown, values.items()))}, as this run was begun")
    plan = make_plan(recipe, machine)
    candidates = {candidate.backend: candidate for candidate in plan.advice.backends}
    candidate = plan.advice.best if BACKEND in auto_keys else candidates[recipe.parallel.backend]
    if candidate is None:
        raise RunError(f"parallel.backend: auto: {plan.refusal}")
    advice = {
        BACKEND: (candidate.backend, f"{candidate.name}: {plan.why}"),
        CHECKPOINTING: ("layers" if candidate.checkpointing else "none", _why_checkpointing(candidate)),
    }
    values = {key: advice[key][0] for key in auto_keys}
    if BACKEND in auto_keys:
        values |= {f"parallel.{axis}": ranks for axis, ranks in candidate.axes.items()}
    return Choice(values, "; ".join(advice[key][1] for key in auto_keys))


def _shown(item: tuple[str, Any]) -> str:
    key, value = item
    return str(value) if isinstance(value, str) else f"{key.rpartition('.')[2]}: {value}"


def _why_checkpointing(candidate: Candidate) -> str:
    if candidate.checkpointing:
        return "layers are recomputed, without which it would not fit"
    if candidate.fits:
        return "memory suffices without recomputation"
    return f"nothing is recomputed, which would not make it fit either: {candidate.shortfall}"
