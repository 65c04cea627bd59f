"""Read from a recipe the learning rate of every step."""

import math
from collections.abc import Callable
from typing import Final

from lorakit.recipe import Recipe
from lorakit.recipe.objective import PREFERENCES
from lorakit.recipe.schema import count_warmup_steps

SMALL_BASE: Final = 100_000_000  # parameters below which a base is so small that usual rates say nothing
USUAL_RATES: Final = {
    **dict.fromkeys(("adamw", "adamw8bit", "paged_adamw", "paged_adamw8bit", "adafactor"), (5e-5, 1e-3)),
    "muon": (1e-4, 2e-3), "lion": (5e-6, 2e-4), "pissa": (1e-5, 5e-4), "olora": (1e-5, 5e-4), "pairs": (5e-7, 2e-4),
}  # fmt: skip
"""optimizer, an initialisation that starts at the largest part of W, or pairs -> lowest and highest usual rate"""


def rate_of(recipe: Recipe, total_steps: int) -> Callable[[int], float]:
    """Return the function from a step, counted from 0, to its learning rate, in a run of so many steps.

    The rate rises linearly over the warm-up, then follows the schedule; all but `constant` reach `min_learning_rate`
    after the last step. Cycles of `cosine` each fall from peak to end (Loshchilov & Hutter 2017, arXiv 1608.03983).
    """
    settings = recipe.train
    peak = settings.learning_rate
    warmup_steps = count_warmup_steps(recipe, total_steps)

    def rate(step: int) -> float:
        if step < warmup_steps:
            return peak * (step + 1) / warmup_steps
        progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        if settings.schedule == "constant":
            return peak
        if settings.schedule == "cosine":
            cycles = settings.schedule_cycles
            # after the last step the last cycle is over, and no other begins
            in_cycle = progress * cycles - min(math.floor(progress * cycles), cycles - 1)
            share = 0.5 * (1 + math.cos(math.pi * in_cycle))
        elif settings.schedule == "wsd":
            share = min(1.0, (1 - progress) / settings.decay_ratio)
        else:
            share = (1 - progress) ** (settings.schedule_power if settings.schedule == "polynomial" else 1.0)
        return settings.min_learning_rate + (peak - settings.min_learning_rate) * share

    return rate


def rate_note(recipe: Recipe, num_parameters: int) -> str | None:
    """Return a sentence if the learning rate is outside of what is usual for its method; else None.

    num_parameters: of the base. Small bases learn at higher rates, and for them nothing is usual.
    """
    settings = recipe.train
    init = recipe.adapter.init
    method: str = init if init in USUAL_RATES else settings.optimizer
    if recipe.objective.name in (*PREFERENCES, "reward"):
        method = "pairs"
    if method not in USUAL_RATES or num_parameters < SMALL_BASE:
        return None
    low, high = USUAL_RATES[method]
    rate = settings.learning_rate
    if low <= rate <= high:
        return None
    what = "lower than usual, as if all weights were trained" if rate < low else "higher than usual"
    return f"learning_rate {rate:g} is {what}: with {method}, adapters mostly learn at {low:g} to {high:g}"
