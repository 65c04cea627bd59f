"""The layouts of a run's processes: the sizes of `pipeline`, `sequence` and `tensor` that a base and a recipe allow."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from torch import nn

from lorakit.errors import RunError
from lorakit.parallel.pipeline.cut import check_stages_fit
from lorakit.parallel.sequence import check_sequence_fits
from lorakit.parallel.tensor import checked_plan
from lorakit.planning.backends import LAYOUTS, accepts
from lorakit.recipe import Recipe
from lorakit.recipe.parallel import NEIGHBOURS

BACKENDS: Final = tuple(name for name, layout in LAYOUTS.items() if layout.has_stages and layout.cuts_weights)
"""backends that go with every axis"""


@dataclass(frozen=True)
class AllowedSizes:
    """sizes: axis -> numbers of processes above 1. refusals: axis -> why it has none."""

    sizes: Mapping[str, tuple[int, ...]]
    refusals: Mapping[str, str]


def allowed_sizes(recipe: Recipe, model: nn.Module, num_processes: int, local_processes: int) -> AllowedSizes:
    """Return the sizes of each axis that divide the processes, and that recipe and base allow.

    model: the adapted base, on meta. local_processes: those of one machine.
    """
    sizes, refusals = dict[str, tuple[int, ...]](), dict[str, str]()
    for axis, problem_of in AXES.items():
        limit = local_processes if axis in NEIGHBOURS else num_processes
        problems = {size: _recipe_problem(recipe, axis, size) or problem_of(model, size) for size in divisors(limit)}
        sizes[axis] = tuple(size for size, problem in problems.items() if not problem)
        if problems and not sizes[axis]:
            refusals[axis] = next(iter(problems.values()))
    return AllowedSizes(sizes, refusals)


def layouts(
    sizes: Mapping[str, tuple[int, ...]], num_axes: int, num_processes: int, local_processes: int, num_heads: int
) -> Iterator[dict[str, int]]:
    """Yield the layouts with so many axes above 1, as axis -> size."""
    for axes in itertools.combinations(AXES, num_axes):
        for chosen in itertools.product(*(sizes[axis] for axis in axes)):
            layout = dict(zip(axes, chosen, strict=True))
            inner = math.prod(layout.get(axis, 1) for axis in NEIGHBOURS)
            if num_processes % math.prod(chosen) == local_processes % inner == num_heads % inner == 0:
                yield layout


def sharing_backends(recipe: Recipe, layout: Mapping[str, int], num_processes: int) -> list[str]:
    """Return the backends for a layout: without any copy of a weight, sharding has nothing to divide."""
    copies = num_processes // (layout.get("pipeline", 1) * layout.get("tensor", 1))
    backends = [name for name in BACKENDS if copies > 1 or not LAYOUTS[name].splits_base]
    return [name for name in backends if accepts(recipe, name, layout)]


def divisors(number: int) -> list[int]:
    """Return the divisors of a number but 1."""
    return [size for size in range(2, number + 1) if number % size == 0]


def _recipe_problem(recipe: Recipe, axis: str, size: int) -> str:
    if axis == "sequence" and not recipe.data.packing:
        return "the recipe does not pack rows (data.packing)"
    return "" if accepts(recipe, BACKENDS[0], {axis: size}) else "refused with other keys of the recipe"


def _refusal(check: Callable[[nn.Module, int], object], model: nn.Module, size: int) -> str:
    """Return why a run of so many processes would be refused by its own check; empty if it would not."""
    try:
        check(model, size)
    except RunError as problem:
        return str(problem)
    return ""


def num_heads(model: nn.Module) -> int:
    """Return the heads of a layer's attention."""
    config: Any = model.config
    return int(getattr(config.get_text_config(), "num_attention_heads", 0) or 1)


AXES: Final[Mapping[str, Callable[[nn.Module, int], str]]] = {
    "pipeline": partial(_refusal, check_stages_fit),
    "sequence": partial(_refusal, check_sequence_fits),
    "tensor": partial(_refusal, checked_plan),
}
"""axis -> why a base does not go with a size of it; empty if it does"""
