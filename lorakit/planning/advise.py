"""Choose among the candidates of a recipe: the simplest that fits, in a fixed order, or the change that makes one fit.

The order is that of BACKENDS, then layouts with axes: the fewest axes, the fewest processes along them, then by AXES.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from lorakit.backends import BACKENDS
from lorakit.errors import RunError
from lorakit.parallel.axes import check_axes
from lorakit.planning.estimate import Candidate, Changes, Estimator, why_refused
from lorakit.planning.skeleton import adapted_skeleton
from lorakit.recipe.parallel import NEIGHBOURS

AXES: Final = ("sequence", "pipeline", "tensor")
"""Simplest first: `sequence` leaves the model as it is, `pipeline` sends between stages, `tensor` in every layer."""
RECOMPUTE: Final[Changes] = {"train.activation_checkpointing": "layers"}
MAX_PROCESSES: Final = 4096  # the search for more processes ends here


@dataclass(frozen=True)
class Advice:
    """The estimates of a recipe and the recommended candidate."""

    backends: tuple[Candidate, ...]  # All backends with the recipe as written.
    best: Candidate | None
    """The simplest that fits; None if nothing fits as the recipe is written. With backend `auto` it may have axes."""
    change: Candidate | None = None  # If nothing fits: the first changed candidate that does.
    layouts: tuple[Candidate, ...] = ()  # The layouts with axes that were tried, because no backend alone fits.
    refused_axes: Mapping[str, str] = field(default_factory=dict)
    """Axis -> why recipe or base refuse it, if layouts were tried."""


def advise(estimator: Estimator) -> Advice:
    """Estimate every backend and recommend one."""
    backends = tuple(as_written(estimator, name, estimator.num_processes) for name in _backends(estimator))
    requested = [candidate for candidate in backends if candidate.num_processes == estimator.num_processes]
    best = _first_that_fits(requested)
    if best is not None:
        return Advice(backends, best)
    changed = _changed(estimator, requested)
    is_auto = estimator.recipe.parallel.is_auto
    change = None if is_auto else _first_that_fits(changed)
    if change is not None:
        return Advice(backends, None, change)
    layouts, refused = _try_layouts(estimator)
    fitting = _first_that_fits(layouts)
    if fitting is not None and is_auto:
        return Advice(backends, fitting, None, layouts, refused)
    # for a named backend ``changed`` is used up here
    change = fitting or _first_that_fits(changed) or _first_that_fits(_with_more_processes(estimator))
    return Advice(backends, None, change, layouts, refused)


def as_written(
    estimator: Estimator, backend: str, num_processes: int, changes: Changes = MappingProxyType({})
) -> Candidate:
    """Estimate the recipe with this backend. `activation_checkpointing: auto` recomputes only if that makes it fit."""
    count = num_processes if BACKENDS[backend].is_distributed else 1
    if estimator.recipe.train.activation_checkpointing != "auto":
        return estimator.estimate(backend, count, changes)
    saving_all = estimator.estimate(backend, count, {**changes, "train.activation_checkpointing": "none"})
    if saving_all.fits:
        return saving_all
    recomputing = estimator.estimate(backend, count, {**changes, **RECOMPUTE})
    return recomputing if recomputing.fits else saving_all


def _backends(estimator: Estimator) -> list[str]:
    return [name for name in BACKENDS if name not in estimator.refusals]


def _first_that_fits(candidates: Iterable[Candidate]) -> Candidate | None:
    return next((candidate for candidate in candidates if candidate.can_run), None)


def _changed(estimator: Estimator, requested: list[Candidate]) -> Iterator[Candidate]:
    """Yield the installed backends with each change; another dtype, which changes the result, comes last."""
    can_halve = estimator.machine.gpu is not None and estimator.dtype == "float32"
    dtypes: list[Changes] = [{}, {"base.dtype": "bfloat16"}] if can_halve else [{}]
    installed = [candidate for candidate in requested if candidate.missing_package is None]
    for dtype, changes in itertools.product(dtypes, _changes(estimator)):
        merged = {**dtype, **changes}
        for candidate in installed if merged else ():
            if _can_offload(estimator, candidate.backend, merged.get("parallel.offload", "none")):
                yield estimator.estimate(candidate.backend, candidate.num_processes, merged)


def _changes(estimator: Estimator) -> Iterator[Changes]:
    """Yield combinations of changes: smaller micro-batches first, then recomputation, then offloading."""
    train = estimator.recipe.train
    size = min(train.micro_batch_size or min(8, train.batch_size), -(-train.batch_size // estimator.num_processes))
    smaller: list[Changes] = [{}]
    while size > 1:
        size = -(-size // 2)
        smaller.append({"train.micro_batch_size": size})
    recomputed = [{}] if train.activation_checkpointing == "layers" else [{}, RECOMPUTE]
    can_offload = estimator.recipe.parallel.offload == "none"
    offloads: list[Changes] = [{}, *({"parallel.offload": where} for where in ("cpu", "stream") if can_offload)]
    for offload, recompute, small in itertools.product(offloads, recomputed, smaller):
        yield {**offload, **recompute, **small}


def _can_offload(estimator: Estimator, backend: str, offload: str) -> bool:
    if offload == "cpu":
        return estimator.machine.gpu is not None and offload in BACKENDS[backend].optimizer_memory
    return offload == "none" or offload in BACKENDS[backend].base_memory


def _with_more_processes(estimator: Estimator) -> Iterator[Candidate]:
    """Yield candidates with a sharded base and more processes, doubling."""
    count = 2 * estimator.num_processes
    while count <= MAX_PROCESSES:
        for recompute, name in itertools.product(({}, RECOMPUTE), _backends(estimator)):
            if BACKENDS[name].shards_base:
                yield estimator.estimate(name, count, {"parallel.processes": count, **recompute})
        count *= 2


def _try_layouts(estimator: Estimator) -> tuple[tuple[Candidate, ...], dict[str, str]]:
    """Estimate layouts with axes until one fits; return them, and axis -> why recipe or base refuse it."""
    parallel = estimator.recipe.parallel
    num_processes = estimator.num_processes
    if num_processes == 1 or max(parallel.axes.values()) > 1 or parallel.offload != "none":
        return (), {}
    sizes, refused, num_heads = _allowed_sizes(estimator)
    tried: list[Candidate] = []
    for layout in mesh_shapes(sizes, num_processes, num_processes // estimator.machine.nodes, num_heads):
        copies = num_processes // (layout.get("pipeline", 1) * layout.get("tensor", 1))
        for name, facts in BACKENDS.items():
            # without copies of a weight there is nothing to shard
            useful = set(AXES) <= set(facts.axes) and (copies > 1 or not facts.shards_base)
            if useful and not why_refused(estimator.recipe, name, layout):
                changes = {f"parallel.{axis}": ranks for axis, ranks in layout.items()}
                tried.append(as_written(estimator, name, num_processes, changes))
                if tried[-1].can_run:
                    return tuple(tried), refused
    return tuple(tried), refused


def mesh_shapes(
    sizes: Mapping[str, tuple[int, ...]], num_processes: int, local_processes: int, num_heads: int
) -> list[dict[str, int]]:
    """Return layouts with one axis, two and three, as axis -> size, in the order of trying.

    sizes: axis -> those allowed. local_processes: of one machine. num_heads: which `sequence` and `tensor` divide.
    """
    layouts = []
    for chosen in itertools.product(*((1, *sizes.get(axis, ())) for axis in AXES)):
        layout = {axis: ranks for axis, ranks in zip(AXES, chosen, strict=True) if ranks > 1}
        inner = math.prod(layout.get(axis, 1) for axis in NEIGHBOURS)
        if layout and num_processes % math.prod(chosen) == local_processes % inner == num_heads % inner == 0:
            layouts.append(layout)
    return sorted(layouts, key=lambda one: (len(one), math.prod(one.values()), [*map(AXES.index, one)]))


def _allowed_sizes(estimator: Estimator) -> tuple[dict[str, tuple[int, ...]], dict[str, str], int]:
    """Return axis -> sizes that recipe and base allow, axis -> why none, and the heads of a layer's attention."""
    recipe = estimator.recipe
    skeleton = adapted_skeleton(estimator.folder, recipe.base, recipe.adapter)
    sizes: dict[str, tuple[int, ...]] = {}
    refused: dict[str, str] = {}
    for axis in AXES:
        limit = estimator.num_processes // (estimator.machine.nodes if axis in NEIGHBOURS else 1)
        problems = {number: "" for number in range(2, limit + 1) if limit % number == 0}
        for number in problems:
            try:
                check_axes(skeleton.model, skeleton.spec, {axis: number})
            except RunError as problem:
                problems[number] = str(problem).removeprefix(f"parallel.{axis}: ")
            if axis == "sequence" and not recipe.data.packing:
                problems[number] = "the recipe does not pack rows (data.packing)"
        sizes[axis] = tuple(number for number, problem in problems.items() if not problem)
        if problems and not sizes[axis]:
            refused[axis] = next(iter(problems.values()))
    config: Any = skeleton.model.config
    return sizes, refused, int(getattr(config.get_text_config(), "num_attention_heads", 0) or 1)
