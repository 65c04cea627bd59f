"""What a recipe leaves open (`auto`), chosen: as the run in its output folder was begun, or as the plan advises."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from lorakit.errors import RunError
from lorakit.planning.estimate import Candidate, changed
from lorakit.planning.plan import run
from lorakit.recipe import Recipe
from lorakit.run.record import RECORD, flatten

BACKEND: Final = "parallel.backend"
RECOMPUTES: Final = "train.activation_checkpointing"


@final
@dataclass(frozen=True)
class Choice:
    """Recipe keys with the values chosen for them, and why; empty when a recipe leaves nothing open."""

    values: Mapping[str, str]
    why: str

    def of(self, recipe: Recipe) -> Recipe:
        """The recipe with the chosen values."""
        return changed(recipe, self.values)


def resolve_auto(recipe: Recipe, *, fresh: bool) -> Choice:
    """Values for what the recipe leaves open. A run that goes on keeps those it began with.

    Raises:
        RunError: nothing fits; says the cheapest change.
    """
    open_keys = recipe.auto_keys
    if not open_keys:
        return Choice({}, "")
    begun = {} if fresh else _begun(Path(recipe.output))
    if begun.get("parallel.processes") == recipe.parallel.processes and begun.keys() >= set(open_keys):
        values = {key: begun[key] for key in open_keys}
        return Choice(values, f"{', '.join(values.values())}, as this run was begun")
    plan = run(recipe)
    ways = {row.way.backend: row.way for row in plan.advice.rows}
    way = plan.advice.best if BACKEND in open_keys else ways[recipe.parallel.backend]
    if way is None:
        raise RunError(f"parallel.backend: auto: {plan.refusal}")
    told = {
        BACKEND: (way.backend, f"{way.backend}: {plan.advice.why}"),
        RECOMPUTES: ("layers" if way.checkpointing else "none", _why_recomputed(way)),
    }
    return Choice({key: told[key][0] for key in open_keys}, "; ".join(told[key][1] for key in open_keys))


def _begun(output: Path) -> Mapping[str, Any]:
    """The flat recipe of the run in a folder; empty when there is none. What cannot be read is said later."""
    try:
        begun = json.loads((output / RECORD).read_text())["recipe"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return flatten(begun) if isinstance(begun, dict) else {}


def _why_recomputed(way: Candidate) -> str:
    if way.checkpointing:
        return "layers are recomputed, without which it would not fit"
    if way.fits:
        return "nothing is recomputed, as memory does not ask for it"
    return f"nothing is recomputed, which would not make it fit either: {way.shortfall}"
