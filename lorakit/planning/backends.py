"""How each backend shards, stores and sends tensors: the only file of this package that names backends.

P: bytes of the base. A: bytes of the adapter in float32. N: processes. m: micro-batches of a process in a step. Bytes
are those of rank 0, which has the largest shards.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from lorakit.planning.communication import (
    Gathered,
    Traffic,
    all_gather_traffic,
    all_reduce_traffic,
    broadcast_bytes,
    ddp_messages,
    fsdp2_gathered,
    zero3_gathered,
    zero3_messages,
    zero12_messages,
)
from lorakit.planning.model_shapes import ModelShapes
from lorakit.planning.sharding import (
    ShardRule,
    adapter_bytes,
    flat_shard,
    row_shard,
    shard_bytes,
    unsharded,
    unsharded_and_flat_shard,
)
from lorakit.recipe import ParallelSection, Recipe
from lorakit.recipe.parallel import OffloadSection


class GatheredBytes(Protocol):
    """Returns the bytes of sharded tensors while they are gathered."""

    def __call__(self, shapes: ModelShapes, num_ranks: int, parallel: ParallelSection, *, on_gpu: bool) -> Gathered: ...


@dataclass(frozen=True)
class Layout:
    """One backend: its shard rules, and the functions that compute its buffers and traffic."""

    base: ShardRule = unsharded
    adapter: ShardRule = unsharded
    optimizer: ShardRule = unsharded
    """Of one of AdamW's two moments."""
    gradients: Callable[[ModelShapes, int], int] = lambda shapes, num_ranks: adapter_bytes(shapes)
    """(shapes, N) -> bytes of gradients between backward and update."""
    one_counter: bool = False
    """One step counter for all tensors, instead of one for each."""
    messages: Callable[[ModelShapes, int, ParallelSection], int] | None = None
    """Bytes of flat copies: of gradients for messages, of parameters for the optimizer."""
    gathered: GatheredBytes | None = None
    loading: Callable[[ModelShapes], int] | None = None
    """Bytes above the resident ones while the base is loaded."""
    traffic: Callable[[ModelShapes, int, int], Traffic] | None = None
    """(shapes, N, m) -> traffic of a step."""
    splits_base: bool = False
    has_stages: bool = False
    """Whether it goes with `parallel.pipeline`."""
    cuts_weights: bool = False
    """Whether processes can share each weight (`parallel.tensor`)."""
    single_process: bool = False
    """The backend has one process, whatever the recipe requests."""
    package: str | None = None
    """Optional package that the backend imports."""
    offloads_adapter: bool = False
    """Whether offloading the base offloads the adapter too."""

    def num_counters(self, shapes: ModelShapes) -> int:
        """Return the number of step counters of AdamW, 4 bytes each."""
        return 1 if self.one_counter else len(shapes.adapter)


def _sharded_gradients(rule: ShardRule) -> Callable[[ModelShapes, int], int]:
    return lambda shapes, num_ranks: shard_bytes(shapes.adapter, rule, num_ranks)


LAYOUTS: Final[Mapping[str, Layout]] = {
    "single": Layout(single_process=True),
    "ddp": Layout(
        messages=ddp_messages, loading=broadcast_bytes, traffic=all_reduce_traffic(gathers=False), has_stages=True,
        cuts_weights=True,
    ),
    "zero1": Layout(
        optimizer=flat_shard, one_counter=True, messages=zero12_messages, traffic=all_reduce_traffic(gathers=True),
        package="deepspeed",
    ),
    "zero2": Layout(
        optimizer=flat_shard, gradients=_sharded_gradients(flat_shard), one_counter=True, messages=zero12_messages,
        traffic=all_reduce_traffic(gathers=True, every_micro_batch=True), package="deepspeed",
    ),
    "zero3": Layout(
        base=flat_shard, adapter=unsharded_and_flat_shard, optimizer=flat_shard,
        gradients=_sharded_gradients(flat_shard), one_counter=True, messages=zero3_messages, gathered=zero3_gathered,
        traffic=all_gather_traffic(with_adapter=False), splits_base=True, package="deepspeed",
    ),
    "fsdp2": Layout(
        base=row_shard, adapter=row_shard, optimizer=row_shard, gradients=_sharded_gradients(row_shard),
        gathered=fsdp2_gathered, traffic=all_gather_traffic(with_adapter=True), splits_base=True,
        offloads_adapter=True, has_stages=True, cuts_weights=True,
    ),
}  # fmt: skip
SIMPLEST_FIRST: Final = ("single", "ddp", "fsdp2", "zero3", "zero1", "zero2")
"""The order of preference among backends that are expected to be equally fast."""


def supported_backends(recipe: Recipe) -> tuple[str, ...]:
    """Return the backends that the recipe's other sections allow, and its axes but for a single process."""
    axes = {"pipeline": recipe.parallel.pipeline, "tensor": recipe.parallel.tensor}
    return tuple(name for name in LAYOUTS if accepts(recipe, name, {} if LAYOUTS[name].single_process else axes))


def accepts(recipe: Recipe, backend: str, axes: Mapping[str, int]) -> bool:
    """True if the recipe's other sections allow a backend with these sizes of axes."""
    parallel: dict[str, Any] = {"backend": backend, **axes, "processes": math.prod(axes.values())}
    try:
        Recipe.model_validate(recipe.model_dump() | {"parallel": parallel})
    except ValueError:
        return False
    return True


def sharing_weights(backend: str, parallel: ParallelSection, num_processes: int) -> int:
    """Return how many processes share each weight: ``tensor``, where the backend and so many processes can."""
    return parallel.tensor if LAYOUTS[backend].cuts_weights and num_processes % parallel.tensor == 0 else 1


def offloads_of(backend: str, parallel: ParallelSection) -> OffloadSection:
    """Return the part of the recipe's offloading that a backend can do."""
    offloads = parallel.model_copy(update={"backend": backend}).offloads
    if offloads.streams:
        return OffloadSection(parameters="stream" if backend == "single" else "none")
    if backend in ("single", "ddp"):
        return OffloadSection()
    if not LAYOUTS[backend].splits_base:
        return OffloadSection(optimizer="none" if offloads.optimizer == "nvme" else offloads.optimizer)
    if backend == "fsdp2" and "cpu" in (offloads.optimizer, offloads.parameters):
        return OffloadSection(optimizer="cpu", parameters="cpu")
    return OffloadSection() if backend == "fsdp2" else offloads
