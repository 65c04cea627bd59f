"""Choose among the candidates of a recipe: the simplest that fits, in a fixed order, or the change that makes one fit.

The order is that of BACKENDS: from what divides least to what divides most.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from lorakit.backends import BACKENDS
from lorakit.planning.estimate import Candidate, Changes, Estimator

RECOMPUTE: Final[Changes] = {"train.activation_checkpointing": "layers"}
MAX_PROCESSES: Final = 4096  # the search for more processes ends here


def as_written(estimator: Estimator, backend: str) -> Candidate:
    """Estimate the recipe with this backend. `activation_checkpointing: auto` recomputes only if that makes it fit."""
    count = estimator.num_processes if BACKENDS[backend].is_distributed else 1
    if estimator.recipe.train.activation_checkpointing != "auto":
        return estimator.estimate(backend, count, {})
    saving_all = estimator.estimate(backend, count, {"train.activation_checkpointing": "none"})
    if saving_all.fits:
        return saving_all
    recomputing = estimator.estimate(backend, count, RECOMPUTE)
    return recomputing if recomputing.fits else saving_all


def first_that_fits(candidates: Iterable[Candidate]) -> Candidate | None:
    return next((candidate for candidate in candidates if candidate.can_run), None)


def changed_candidates(estimator: Estimator, requested: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield the installed backends with each change, then with more processes.

    Another dtype, which changes the result, comes last of the changes.
    """
    can_halve = estimator.machine.gpu is not None and estimator.dtype == "float32"
    dtypes: list[Changes] = [{}, {"base.dtype": "bfloat16"}] if can_halve else [{}]
    installed = [candidate for candidate in requested if candidate.missing_package is None]
    for dtype, changes in itertools.product(dtypes, _changes(estimator)):
        merged = {**dtype, **changes}
        for candidate in installed if merged else ():
            if _can_offload(estimator, candidate.backend, merged.get("parallel.offload", "none")):
                yield estimator.estimate(candidate.backend, candidate.num_processes, merged)
    yield from _with_more_processes(estimator)


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
        for recompute, name in itertools.product(({}, RECOMPUTE), estimator.backends):
            if BACKENDS[name].shards_base:
                yield estimator.estimate(name, count, {"parallel.processes": count, **recompute})
        count *= 2
