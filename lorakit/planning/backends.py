"""What each backend splits, holds and sends: the only file of this package that knows backends by name.

P: the base. A: the adapter in float32. N: processes. Bytes are those of rank 0, which has the largest parts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from lorakit.planning.communication import (
    Gathered,
    Traffic,
    all_gather_traffic,
    all_reduce_traffic,
    broadcast_bytes,
    ddp_messages,
    fsdp2_gathered,
    no_bytes,
    no_gather,
    no_messages,
    no_traffic,
    zero3_gathered,
    zero3_messages,
    zero12_messages,
)  # fmt: skip
from lorakit.planning.model_shapes import ModelShapes
from lorakit.planning.sharding import ShardRule, adapter_bytes, flat_shard, row_shard, sum_of, whole, whole_and_part
from lorakit.recipe import ParallelSection, Recipe
from lorakit.recipe.parallel import OffloadSection


@dataclass(frozen=True)
class Layout:
    """One backend. Bytes are those of rank 0, which has the largest parts."""

    splits_base: bool
    base: ShardRule
    adapter: ShardRule
    optimizer: ShardRule
    """Of one of AdamW's two moments."""
    num_counters: Callable[[ModelShapes], int]
    """Of steps, 4 bytes each."""
    gradients: Callable[[ModelShapes, int], int]
    """Gradients that rest between backward and update."""
    messages: Callable[[ModelShapes, int, ParallelSection], int]
    """Flat copies: of gradients for messages, of what an optimizer updates."""
    gathered: Callable[[ModelShapes, int, ParallelSection], Gathered]
    loading: Callable[[ModelShapes], int]
    """Bytes above what is held, while the base is brought in."""
    traffic: Callable[[ModelShapes, int, int], Traffic]
    """(shapes, N, m)"""
    alone: bool = False
    """One process, whatever the recipe says."""
    needs: str | None = None
    """A package that may not be installed."""
    adapter_rests_with_base: bool = False
    """Whether what offloads the base takes the adapter along."""


def _whole_adapter(shapes: ModelShapes, num_ranks: int) -> int:
    return adapter_bytes(shapes)


def _parts_of(part: ShardRule) -> Callable[[ModelShapes, int], int]:
    return lambda shapes, num_ranks: sum_of(shapes.adapter, part, num_ranks)


def _each(shapes: ModelShapes) -> int:
    return len(shapes.adapter)


def _one(shapes: ModelShapes) -> int:
    return 1


LAYOUTS: Final[Mapping[str, Layout]] = {
    "single": Layout(
        splits_base=False, base=whole, adapter=whole, optimizer=whole, num_counters=_each, gradients=_whole_adapter,
        messages=no_messages, gathered=no_gather, loading=no_bytes, traffic=no_traffic, alone=True,
    ),
    "ddp": Layout(
        splits_base=False, base=whole, adapter=whole, optimizer=whole, num_counters=_each, gradients=_whole_adapter,
        messages=ddp_messages, gathered=no_gather, loading=broadcast_bytes, traffic=all_reduce_traffic(2.0),
    ),
    "zero1": Layout(
        splits_base=False, base=whole, adapter=whole, optimizer=flat_shard, num_counters=_one,
        gradients=_whole_adapter, messages=zero12_messages, gathered=no_gather, loading=no_bytes,
        traffic=all_reduce_traffic(3.0), needs="deepspeed",
    ),
    "zero2": Layout(
        splits_base=False, base=whole, adapter=whole, optimizer=flat_shard, num_counters=_one,
        gradients=_parts_of(flat_shard), messages=zero12_messages, gathered=no_gather, loading=no_bytes,
        traffic=all_reduce_traffic(3.0), needs="deepspeed",
    ),
    "zero3": Layout(
        splits_base=True, base=flat_shard, adapter=whole_and_part, optimizer=flat_shard, num_counters=_one,
        gradients=_parts_of(flat_shard), messages=zero3_messages, gathered=zero3_gathered, loading=no_bytes,
        traffic=all_gather_traffic(with_adapter=False), needs="deepspeed",
    ),
    "fsdp2": Layout(
        splits_base=True, base=row_shard, adapter=row_shard, optimizer=row_shard, num_counters=_each,
        gradients=_parts_of(row_shard), messages=no_messages, gathered=fsdp2_gathered, loading=no_bytes,
        traffic=all_gather_traffic(with_adapter=True), adapter_rests_with_base=True,
    ),
}  # fmt: skip
SIMPLEST_FIRST: Final = ("single", "ddp", "fsdp2", "zero3", "zero1", "zero2")
"""Which is taken of those that are expected to be as fast."""


def supported_backends(recipe: Recipe) -> tuple[str, ...]:
    """The backends that the rules of recipes leave a recipe, whatever its own `parallel` section says."""
    return tuple(name for name in LAYOUTS if _accepts(recipe, name))


def _accepts(recipe: Recipe, backend: str) -> bool:
    try:
        Recipe.model_validate(recipe.model_dump() | {"parallel": {"backend": backend}})
    except ValueError:
        return False
    return True


def offloads_of(backend: str, parallel: ParallelSection) -> OffloadSection:
    """What a backend would do of the recipe's offloading."""
    places = parallel.model_copy(update={"backend": backend}).offloads
    if places.streams:
        return OffloadSection(parameters="stream" if backend == "single" else "none")
    if backend in ("single", "ddp"):
        return OffloadSection()
    if not LAYOUTS[backend].splits_base:
        return OffloadSection(optimizer="none" if places.optimizer == "nvme" else places.optimizer)
    if backend == "fsdp2" and "cpu" in (places.optimizer, places.parameters):
        return OffloadSection(optimizer="cpu", parameters="cpu")
    return OffloadSection() if backend == "fsdp2" else places
