"""Compare the candidates of a recipe: which fit, which is fastest and why, and which cheapest change makes one fit."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from lorakit.planning.backends import LAYOUTS, SIMPLEST_FIRST, offloads_of, sharing_weights
from lorakit.planning.estimate import Candidate, Changes, Estimator
from lorakit.planning.gpus import GB
from lorakit.planning.layouts import layouts, sharing_backends
from lorakit.planning.sharding import adapter_bytes, base_bytes
from lorakit.planning.stages import num_stages

EQUALLY_FAST: Final = 1.03
"""Step times within this factor count as equal, because estimates are no better; the simplest backend then wins."""
RECOMPUTE: Final[Changes] = {"train.activation_checkpointing": "layers"}
MAX_PROCESSES: Final = 4096  # the search for more processes ends here


@dataclass(frozen=True)
class BackendEstimate:
    """A backend with the recipe as written, and the cheapest change with which it fits."""

    candidate: Candidate
    cheapest_change: Candidate | None
    """None if the candidate fits, if its package is missing, or if no change helps."""


@dataclass(frozen=True)
class Advice:
    """The estimates of all backends and the recommended candidate."""

    backends: tuple[BackendEstimate, ...]
    best: Candidate | None
    """None if nothing fits as the recipe is written. With backend `auto` it may have axes besides."""
    why: str
    cheapest: Candidate | None
    """If nothing fits: the fastest changed candidate that does."""
    layouts: tuple[Candidate, ...] = ()
    """With axes besides `data`, for a recipe that names none."""


def advise(estimator: Estimator) -> Advice:
    """Estimate every backend and recommend one."""
    num_processes = estimator.num_processes
    estimates = []
    for backend in estimator.backends:
        candidate = as_written(estimator, backend, num_processes)
        change = None if candidate.fits or candidate.missing_package else cheapest_change(estimator, candidate)
        estimates.append(BackendEstimate(candidate, change))
    candidates = [estimate.candidate for estimate in estimates]
    best = fastest([c for c in candidates if c.can_run and _has_requested_processes(c, num_processes)])
    with_layouts = with_axes(estimator, num_processes, search=best is None)
    if best is not None:
        why = reason(estimator, best, candidates) + alone_is_faster(best, candidates)
        return Advice(tuple(estimates), best, why, None, with_layouts)
    with_layout = fastest([layout for layout in with_layouts if layout.can_run])
    if with_layout is not None and estimator.recipe.parallel.is_auto:
        return Advice(tuple(estimates), with_layout, layout_reason(with_layout, candidates), None, with_layouts)
    changes = [estimate.cheapest_change for estimate in estimates if estimate.cheapest_change is not None]
    changes = [change for change in changes if _has_requested_processes(change, num_processes)]
    cheapest = fastest(changes if with_layout is None else [*changes, with_layout])
    return Advice(tuple(estimates), None, "", cheapest or more_processes(estimator, num_processes), with_layouts)


def with_axes(estimator: Estimator, num_processes: int, *, search: bool) -> tuple[Candidate, ...]:
    """Estimate the layouts with one axis besides `data`; none for a recipe that names axes itself.

    search: as long as nothing fits, also those with two axes, then three, because each axis makes a run send more.
    """
    parallel = estimator.recipe.parallel
    if num_processes == 1 or max(parallel.axes.values()) > 1 or parallel.offload != "none":
        return ()
    (allowed, heads), local = estimator.allowed(), max(1, num_processes // estimator.machine.nodes)
    tried: list[Candidate] = []
    for num_axes in (1, 2, 3):
        for sizes in layouts(allowed.sizes, num_axes, num_processes, local, heads):
            changes = {f"parallel.{axis}": size for axis, size in sizes.items()}
            for backend in sharing_backends(estimator.recipe, sizes, num_processes):
                tried.append(as_written(estimator, backend, num_processes, changes))
        if not search or any(candidate.can_run for candidate in tried):
            break
    return tuple(tried)


def as_written(
    estimator: Estimator, backend: str, num_processes: int, changes: Changes = MappingProxyType({})
) -> Candidate:
    """Estimate the recipe with this backend. `activation_checkpointing: auto` recomputes only if that makes it fit."""
    count = 1 if LAYOUTS[backend].single_process else num_processes
    if estimator.recipe.train.activation_checkpointing != "auto":
        return estimator.estimate(backend, count, changes)
    saving_all = estimator.estimate(backend, count, {**changes, "train.activation_checkpointing": "none"})
    if saving_all.fits:
        return saving_all
    recomputing = estimator.estimate(backend, count, {**changes, **RECOMPUTE})
    return recomputing if recomputing.fits else saving_all


def fastest(candidates: list[Candidate]) -> Candidate | None:
    """Return the candidate with the shortest step; None if there are no candidates.

    Among equally fast ones the fewest changes win, then the simplest backend.
    """
    if not candidates:
        return None
    shortest = min(candidate.step.total for candidate in candidates)
    near = [candidate for candidate in candidates if candidate.step.total <= EQUALLY_FAST * shortest]
    return min(near, key=lambda candidate: (len(candidate.changes), SIMPLEST_FIRST.index(candidate.backend)))


def cheapest_change(estimator: Estimator, candidate: Candidate) -> Candidate | None:
    """Return the fastest candidate that fits with the same backend and some changes; None if no change helps."""
    backend, num_processes = candidate.backend, candidate.num_processes
    for dtype in _dtypes(estimator):  # another dtype changes the computed numbers: only when nothing else helps
        changed = [
            estimator.estimate(backend, num_processes, changes) for changes in _changes(estimator, candidate, dtype)
        ]
        if fitting := [candidate for candidate in changed if candidate.can_run]:
            return fastest(fitting)
    return None


def more_processes(estimator: Estimator, num_processes: int) -> Candidate | None:
    """Return the candidate with the fewest processes, doubling, that fits with a sharded base; None beyond the limit.

    Recomputation is tried at every number of processes.
    """
    count = 2 * num_processes
    while count <= MAX_PROCESSES:
        candidates = [
            estimator.estimate(name, count, {"parallel.processes": count, **recompute})
            for recompute in ({}, RECOMPUTE)
            for name in estimator.backends
            if LAYOUTS[name].splits_base
        ]
        if fitting := [candidate for candidate in candidates if candidate.can_run]:
            return fastest(fitting)
        count *= 2
    return None


def reason(estimator: Estimator, best: Candidate, candidates: list[Candidate]) -> str:
    """Explain in one sentence why ``best`` is recommended."""
    shapes, layout = estimator.shapes(), LAYOUTS[best.backend]
    base, adapter = f"{base_bytes(shapes) / GB:,.2f} GB", f"{adapter_bytes(shapes) / 1e6:,.1f} MB"
    others = [c for c in candidates if c.can_run and LAYOUTS[c.backend].splits_base and c is not best]
    if layout.single_process:
        return "one process is enough for the request, and sends nothing"
    shared = sharing_weights(best.backend, estimator.recipe.parallel, best.num_processes)
    shared *= num_stages(estimator.recipe.parallel, best.backend, best.num_processes // shared)
    part = f"the full base of {base}" if shared == 1 else f"a process's part of the base of {base}"
    if not layout.splits_base and shared == best.num_processes:
        return f"{part} fits each process, and each has another part, so nothing of the base is gathered"
    if not layout.splits_base:
        gathers = ""
        if others:
            count = 2 * best.work.micro_batches
            whose = f"the base of {base}" if shared == 1 else "it"
            gathers = f"; {_listed(others)} would gather {whose} {count} times a step"
        sends = f"only the adapter's {adapter}" if shared == 1 else "what its axes need and the adapter's gradients"
        return f"{part} fits each process, so a step sends {sends}{gathers}"
    unsharded = [candidate for candidate in candidates if not LAYOUTS[candidate.backend].splits_base]
    why = f"{part.replace('the full', 'a full')} does not fit each process ({_listed(unsharded)})"
    if others and layout.package is None and LAYOUTS[others[0].backend].package is not None:
        why += f"; it gathers layer by layer, in fewer messages than {_listed(others)}, and needs no other package"
    elif others:
        why += f"; {_listed(others)} would take {others[0].step.total / best.step.total:.2f} times as long"
    return why


def alone_is_faster(best: Candidate, candidates: list[Candidate]) -> str:
    """Name the single process that fits and is faster than the processes that the recipe requests; else nothing."""
    alone = fastest([c for c in candidates if c.can_run and c.num_processes == 1])
    if alone is None or alone.step.total * EQUALLY_FAST >= best.step.total:
        return ""
    return (
        f"; one process would be faster, {alone.step.total / best.step.total:.0%} of this time a step"
        f" (parallel.backend={alone.backend} parallel.processes=1)"
    )


def layout_reason(best: Candidate, candidates: list[Candidate]) -> str:
    """Explain in one sentence why ``best`` has axes besides `data`."""
    alone = [candidate for candidate in candidates if not candidate.can_run and candidate.num_processes > 1]
    closest = min(alone, key=lambda candidate: candidate.memory.peak)
    axes = " x ".join(f"{axis}: {size}" for axis, size in best.axes.items())
    part = f"{axes} leaves {best.memory.base / GB:,.2f} GB of the base and {best.memory.activations / GB:,.2f} GB of"
    sent = sum(best.traffic[axis].num_messages for axis in best.axes)
    idle = f" and idles for {best.idle:.0%} of it" if best.idle else ""
    return (
        f"no backend alone fits {closest.num_processes} processes ({closest.backend} comes closest and needs"
        f" {closest.lacks}); {part} activations in a process, which sends {sent:,} messages for it in a step{idle}"
    )


def _has_requested_processes(candidate: Candidate, num_processes: int) -> bool:
    """True unless the candidate is a single process for a recipe that requests several."""
    return candidate.num_processes == num_processes or "parallel.processes" in candidate.changes


def _dtypes(estimator: Estimator) -> list[Changes]:
    can_halve = estimator.machine.gpu is not None and estimator.dtype == "float32"
    return [{}, {"base.dtype": "bfloat16"}] if can_halve else [{}]


def _changes(estimator: Estimator, candidate: Candidate, dtype: Changes) -> Iterator[Changes]:
    """Yield the combinations of changes that leave the trained result the same, with ``dtype`` in each."""
    parallel, layout = estimator.recipe.parallel, LAYOUTS[candidate.backend]
    smaller = [{}, *({"train.micro_batch_size": size} for size in _smaller_sizes(estimator, candidate))]
    recomputed: list[Changes] = [{}] if candidate.checkpointing else [{}, RECOMPUTE]
    offloads: list[Changes] = [{}]
    on_host = offloads_of(candidate.backend, parallel.model_copy(update={"offload": "cpu"}))
    if estimator.machine.gpu is not None and parallel.offload == "none" and on_host.optimizer == "cpu":
        offloads.append({"parallel.offload": "cpu"})
    if layout.single_process and parallel.offload == "none":
        offloads.append({"parallel.offload": "stream"})
    for offload, recompute, small in itertools.product(offloads, recomputed, smaller):
        changes: dict[str, Any] = {**dtype, **offload, **recompute, **small}
        if changes:
            yield changes


def _smaller_sizes(estimator: Estimator, candidate: Candidate) -> Iterator[int]:
    """Yield smaller micro-batch sizes, halving down to 1."""
    train = estimator.recipe.train
    size = train.micro_batch_size or min(8, train.batch_size)
    size = min(size, -(-train.batch_size // candidate.num_processes))
    while size > 1:
        size = -(-size // 2)
        yield size


def _listed(candidates: list[Candidate]) -> str:
    return ", ".join(candidate.backend for candidate in candidates)
