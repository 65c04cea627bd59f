"""Choose among the candidates of a recipe: the simplest that fits, in a fixed order, or the change that makes one fit.

The order is that of BACKENDS: from what divides least to what divides most.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from lorakit.backends import BACKENDS
from lorakit.planning.estimate import Candidate, Changes, Estimator

RECOMPUTE: Final[Changes] = {"train.activation_checkpointing": "layers"}
MAX_PROCESSES: Final = 4096  # the search for more processes ends here


@dataclass(frozen=True)
class Advice:
    """The estimates of a recipe and the recommended candidate."""

    backends: tuple[Candidate, ...]  # All backends with the recipe as written.
    requested: tuple[Candidate, ...]  # Those of them that run with as many processes as are planned.
    best: Candidate | None  # The simplest that fits; None if nothing fits as the recipe is written.
    change: Candidate | None = None  # If nothing fits: the first changed candidate that does.


def advise(estimator: Estimator) -> Advice:
    """Estimate every backend and recommend one."""
    backends = tuple(as_written(estimator, name, estimator.num_processes) for name in _backends(estimator))
    requested = tuple(one for one in backends if one.num_processes == estimator.num_processes)
    best = _first_that_fits(requested)
    if best is not None:
        return Advice(backends, requested, best)
    changed = itertools.chain(_changed(estimator, requested), _with_more_processes(estimator))
    return Advice(backends, requested, None, _first_that_fits(changed))


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


def _changed(estimator: Estimator, requested: Sequence[Candidate]) -> Iterator[Candidate]:
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
