"""Which ways fit, which is expected to be fastest and why, and the cheapest change that makes a too-large one fit."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from lorakit.planning.backends import LAYOUTS, SIMPLEST_FIRST, offloads_of
from lorakit.planning.estimate import Candidate, Changes, Estimator
from lorakit.planning.machine import GB
from lorakit.planning.sharding import adapter_bytes, base_bytes

AS_FAST: Final = 1.03
"""Ways whose steps are expected to differ by less are taken to be as fast; then the simplest is advised."""
RECOMPUTE: Final[Changes] = {"train.activation_checkpointing": "layers"}
MANY_PROCESSES: Final = 4096  # beyond that no number of processes is looked for


@dataclass(frozen=True)
class Row:
    """A backend as the recipe stands, and where that does not fit the cheapest change with which it does."""

    way: Candidate
    change: Candidate | None


@dataclass(frozen=True)
class Advice:
    """The ways of a recipe and the one to take; ``best`` is None when none fits as the recipe stands."""

    rows: tuple[Row, ...]
    best: Candidate | None
    why: str
    cheapest: Candidate | None
    """When none fits: the fastest of the changed ways that do."""


def advise(weigher: Estimator) -> Advice:
    """Weigh every backend."""
    num_processes = weigher.num_processes
    rows = []
    for backend in weigher.backends:
        way = as_written(weigher, backend, num_processes)
        rows.append(Row(way, None if way.fits else cheapest_change(weigher, way)))
    best = fastest([row.way for row in rows if row.way.fits and _is_asked(row.way, num_processes)])
    if best is not None:
        return Advice(tuple(rows), best, reason(weigher, best, [row.way for row in rows]), None)
    changed_ways = [row.change for row in rows if row.change is not None and _is_asked(row.change, num_processes)]
    cheapest = fastest(changed_ways) or more_processes(weigher, num_processes)
    return Advice(tuple(rows), None, "", cheapest)


def as_written(weigher: Estimator, backend: str, num_processes: int) -> Candidate:
    """The recipe with this backend. `activation_checkpointing: auto` recomputes only if memory asks for it."""
    count = 1 if LAYOUTS[backend].alone else num_processes
    if weigher.recipe.train.activation_checkpointing != "auto":
        return weigher.way(backend, count, {})
    kept = weigher.way(backend, count, {"train.activation_checkpointing": "none"})
    if kept.fits:
        return kept
    recomputed = weigher.way(backend, count, RECOMPUTE)
    return recomputed if recomputed.fits else kept


def fastest(ways: list[Candidate]) -> Candidate | None:
    """The one with the shortest step; of those that are as fast, the one with the fewest changes, then the simplest."""
    if not ways:
        return None
    shortest = min(way.step.total for way in ways)
    near = [way for way in ways if way.step.total <= AS_FAST * shortest]
    return min(near, key=lambda way: (len(way.changes), SIMPLEST_FIRST.index(way.backend)))


def cheapest_change(weigher: Estimator, way: Candidate) -> Candidate | None:
    """The fastest way with the same backend and some changes that fits; None when nothing helps."""
    for dtype in _dtypes(weigher):  # another dtype changes what is computed: only when nothing else helps
        ways = [weigher.way(way.backend, way.num_processes, changes) for changes in _changes(weigher, way, dtype)]
        if any(changed.fits for changed in ways):
            return fastest([changed for changed in ways if changed.fits])
    return None


def more_processes(weigher: Estimator, num_processes: int) -> Candidate | None:
    """The fewest processes, doubling, with which a backend that splits the base fits, recomputing if it must."""
    count = 2 * num_processes
    while count <= MANY_PROCESSES:
        ways = [
            weigher.way(name, count, {"parallel.processes": count, **recompute})
            for recompute in ({}, RECOMPUTE)
            for name in weigher.backends
            if LAYOUTS[name].splits_base
        ]
        if any(way.fits for way in ways):
            return fastest([way for way in ways if way.fits])
        count *= 2
    return None


def reason(weigher: Estimator, best: Candidate, ways: list[Candidate]) -> str:
    """Why this one, in words."""
    shapes, layout = weigher.shapes(), LAYOUTS[best.backend]
    base, adapter = f"{base_bytes(shapes) / GB:,.2f} GB", f"{adapter_bytes(shapes) / 1e6:,.1f} MB"
    others = [way for way in ways if way.fits and LAYOUTS[way.backend].splits_base and way is not best]
    if layout.alone:
        return "one process is enough for what is asked, and sends nothing"
    if not layout.splits_base:
        gathers = ""
        if others:
            count = 2 * best.work.micro_batches
            gathers = f"; {_listed(others)} would gather the base of {base} {count} times a step"
        return f"the whole base of {base} fits each process, so a step sends only the adapter's {adapter}{gathers}"
    whole = [way for way in ways if not LAYOUTS[way.backend].splits_base]
    why = f"a whole base of {base} does not fit each process ({_listed(whole)})"
    if others and layout.needs is None and LAYOUTS[others[0].backend].needs is not None:
        why += f"; it gathers layer by layer, in fewer messages than {_listed(others)}, and needs no other package"
    elif others:
        why += f"; {_listed(others)} would take {others[0].step.total / best.step.total:.2f} times as long"
    return why


def _is_asked(way: Candidate, num_processes: int) -> bool:
    """A single process is no way to run a recipe that asks for several."""
    return way.num_processes == num_processes or "parallel.processes" in way.changes


def _dtypes(weigher: Estimator) -> list[Changes]:
    lighter = weigher.machine.gpu is not None and weigher.dtype == "float32"
    return [{}, {"base.dtype": "bfloat16"}] if lighter else [{}]


def _changes(weigher: Estimator, way: Candidate, dtype: Changes) -> Iterator[Changes]:
    """What could be changed without touching what is learnt."""
    smaller = [{}, *({"train.micro_batch_size": size} for size in _smaller(weigher, way))]
    recomputed: list[Changes] = [{}] if way.checkpointing else [{}, RECOMPUTE]
    offloads: list[Changes] = [{}]
    places = offloads_of(way.backend, weigher.recipe.parallel.model_copy(update={"offload": "cpu"}))
    if weigher.machine.gpu is not None and weigher.recipe.parallel.offload == "none" and places.optimizer == "cpu":
        offloads.append({"parallel.offload": "cpu"})
    if LAYOUTS[way.backend].alone and weigher.recipe.parallel.offload == "none":
        offloads.append({"parallel.offload": "stream"})
    for offload, recompute, small in itertools.product(offloads, recomputed, smaller):
        changes: dict[str, Any] = {**dtype, **offload, **recompute, **small}
        if changes:
            yield changes


def _smaller(weigher: Estimator, way: Candidate) -> Iterator[int]:
    size = weigher.recipe.train.micro_batch_size or min(8, weigher.recipe.train.batch_size)
    size = min(size, -(-weigher.recipe.train.batch_size // way.num_processes))
    while size > 1:
        size = -(-size // 2)
        yield size


def _listed(ways: list[Candidate]) -> str:
    return ", ".join(way.backend for way in ways)
