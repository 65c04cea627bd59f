"""How each backend shards, stores and gathers tensors: the only file of this package that names backends.

P: bytes of the base. A: bytes of the adapter in float32. N: processes. Bytes are those of rank 0, which has the
largest shards.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from lorakit.planning.model_shapes import ROOT, ModelShapes
from lorakit.planning.sharding import (
    ShardRule,
    adapter_bytes,
    base_bytes,
    flat_shard,
    row_shard,
    shard_bytes,
    unsharded,
    unsharded_and_flat_shard,
)
from lorakit.recipe import ParallelSection, Recipe
from lorakit.recipe.parallel import OffloadSection

MEGABYTE: Final = 1_000_000


@dataclass(frozen=True)
class Gathered:
    """Bytes of sharded tensors while they are gathered, in three phases of a micro-batch."""

    start: int = 0
    """Before the first layer, when no activation exists yet."""
    layer: int = 0
    head: int = 0


class GatheredBytes(Protocol):
    """Returns the bytes of sharded tensors while they are gathered."""

    def __call__(self, shapes: ModelShapes, num_ranks: int, parallel: ParallelSection, *, on_gpu: bool) -> Gathered: ...


def _ddp_messages(shapes: ModelShapes, num_ranks: int, parallel: ParallelSection) -> int:
    """Return A: the gradients are summed in one message, a flat copy of them."""
    return adapter_bytes(shapes)


def _zero12_messages(shapes: ModelShapes, num_ranks: int, parallel: ParallelSection) -> int:
    """Return A / N for the flat shard being updated, plus two buckets: one is filled while the other is sent."""
    return adapter_bytes(shapes) // num_ranks + 2 * _bucket(shapes, parallel)


def _zero3_messages(shapes: ModelShapes, num_ranks: int, parallel: ParallelSection) -> int:
    """Return A / N for the flat shard being updated, plus one bucket."""
    return adapter_bytes(shapes) // num_ranks + _bucket(shapes, parallel)


def _bucket(shapes: ModelShapes, parallel: ParallelSection) -> int:
    """Return the bytes of one gradient message: ``bucket_mb``, or A if A is smaller."""
    return min(adapter_bytes(shapes), round(parallel.bucket_mb * MEGABYTE))


def _zero3_gathered(shapes: ModelShapes, num_ranks: int, parallel: ParallelSection, *, on_gpu: bool) -> Gathered:
    """Return the bytes gathered under ZeRO-3: ``prefetch_mb`` plus L, the largest tensor, at most P.

    Before the first layer they exist twice, as messages and as the tensors cut from the messages. Later they exist
    once, beside one message of L. On CPUs each message exists once more, because gloo gathers into a copy of its own
    (measured: 158 MB above an output of 160), and frees it with the message. A single process gathers two L. DeepSpeed
    counts prefetched elements at two bytes each, so a float32 base has twice ``prefetch_mb`` and a 4-bit base about
    half.
    """
    itemsize = base_bytes(shapes) / sum(tensor.numel for tensor in shapes.frozen)
    largest = max(tensor.nbytes for tensor in shapes.frozen)
    if num_ranks == 1:
        return Gathered(2 * largest, 2 * largest, 2 * largest)
    ahead = min(base_bytes(shapes), round(parallel.prefetch_mb * MEGABYTE / 2 * itemsize) + largest)
    copies = 1 if on_gpu else 2
    return Gathered((1 + copies) * ahead, ahead + copies * largest, ahead + copies * largest)


def _fsdp2_gathered(shapes: ModelShapes, num_ranks: int, parallel: ParallelSection, *, on_gpu: bool) -> Gathered:
    """Return the bytes gathered under FSDP2: R plus up to three layers.

    R, the root group of all tensors outside the layers, stays gathered from forward to the end of backward. The layers
    are the layer in use, the message of the next layer, and the last message of forward, which FSDP2 frees when the
    next forward begins. Without ``reshard_after_forward`` all layers stay gathered.
    """
    groups = shapes.bytes_of_groups()
    root = groups.pop(ROOT, 0)
    in_embedding = [name for name in groups if shapes.embedding is not None and shapes.embedding.startswith(f"{name}.")]
    embedding = sum(groups[name] for name in in_embedding)
    largest = max((size for name, size in groups.items() if name not in in_embedding), default=0)
    num_messages = 0 if num_ranks == 1 else 1
    all_layers = 0 if parallel.reshard_after_forward else sum(groups.values())
    return Gathered(
        start=root + (1 + num_messages) * embedding,
        layer=root + max(all_layers, largest) + 2 * num_messages * largest,
        head=root + all_layers + 2 * num_messages * largest,
    )


def _sharded_gradients(rule: ShardRule) -> Callable[[ModelShapes, int], int]:
    return lambda shapes, num_ranks: shard_bytes(shapes.adapter, rule, num_ranks)


@dataclass(frozen=True)
class BackendRules:
    """One backend: its shard rules, its buffers, and what it goes with."""

    base: ShardRule = unsharded
    adapter: ShardRule = unsharded
    optimizer: ShardRule = unsharded
    """Of one of AdamW's two moments."""
    gradients: Callable[[ModelShapes, int], int] = lambda shapes, num_ranks: adapter_bytes(shapes)
    """(shapes, N) -> bytes of gradients between backward and update."""
    one_counter: bool = False
    """One step counter for all tensors, instead of one for each."""
    messages: Callable[[ModelShapes, int, ParallelSection], int] = lambda shapes, num_ranks, parallel: 0
    """Bytes of flat copies: of gradients for messages, of parameters for the optimizer."""
    gathered: GatheredBytes = lambda shapes, num_ranks, parallel, *, on_gpu: Gathered()
    splits_base: bool = False
    cuts_model: bool = False
    """Whether it goes with `parallel.pipeline` and `parallel.tensor`."""
    single_process: bool = False
    """The backend has one process, whatever the recipe requests."""
    package: str | None = None
    """Optional package that the backend imports."""
    offloads_adapter: bool = False
    """Whether offloading the base offloads the adapter too."""


BACKENDS: Final[Mapping[str, BackendRules]] = {
    "single": BackendRules(single_process=True),
    "ddp": BackendRules(messages=_ddp_messages, cuts_model=True),
    "zero1": BackendRules(optimizer=flat_shard, one_counter=True, messages=_zero12_messages, package="deepspeed"),
    "zero2": BackendRules(
        optimizer=flat_shard, gradients=_sharded_gradients(flat_shard), one_counter=True, messages=_zero12_messages,
        package="deepspeed",
    ),
    "fsdp2": BackendRules(
        base=row_shard, adapter=row_shard, optimizer=row_shard, gradients=_sharded_gradients(row_shard),
        gathered=_fsdp2_gathered, splits_base=True, offloads_adapter=True, cuts_model=True,
    ),
    "zero3": BackendRules(
        base=flat_shard, adapter=unsharded_and_flat_shard, optimizer=flat_shard,
        gradients=_sharded_gradients(flat_shard), one_counter=True, messages=_zero3_messages, gathered=_zero3_gathered,
        splits_base=True, package="deepspeed",
    ),
}  # fmt: skip
"""Simplest first, the order in which a plan and `auto` try them: each divides at least what those before it divide.
fsdp2 is before zero3, because it needs no other package."""


def refusals(recipe: Recipe) -> dict[str, str]:
    """Return backend -> why the recipe's other sections refuse it, for each that they refuse."""
    reasons = {}
    for name in BACKENDS:
        axes = axis_sizes(name, recipe.parallel) | {"sequence": 1}  # which goes with every backend of several processes
        reasons[name] = why_refused(recipe, name, axes)
    return {name: why for name, why in reasons.items() if why}


def why_refused(recipe: Recipe, backend: str, axes: Mapping[str, int]) -> str:
    """Return why the recipe's other sections refuse a backend with these sizes of axes; empty if they do not."""
    parallel: dict[str, Any] = {"backend": backend, **axes, "processes": math.prod(axes.values())}
    try:
        Recipe.model_validate(recipe.model_dump() | {"parallel": parallel})
    except ValueError as problem:
        first: Any = problem.errors()[0]  # type: ignore[attr-defined]  # pydantic's
        return str(first["msg"]).removeprefix("Value error, ").partition(", got ")[0]
    return ""


def axis_sizes(backend: str, parallel: ParallelSection) -> dict[str, int]:
    """Return axis -> processes along it, where a backend has several processes."""
    return dict.fromkeys(parallel.axes, 1) if BACKENDS[backend].single_process else parallel.axes


def offloads_of(backend: str, parallel: ParallelSection) -> OffloadSection:
    """Return the part of the recipe's offloading that a backend can do."""
    offloads = parallel.model_copy(update={"backend": backend}).offloads
    if offloads.streams:
        return OffloadSection(parameters="stream" if backend == "single" else "none")
    if backend in ("single", "ddp"):
        return OffloadSection()
    if not BACKENDS[backend].splits_base:
        return OffloadSection(optimizer="none" if offloads.optimizer == "nvme" else offloads.optimizer)
    if backend == "fsdp2" and "cpu" in (offloads.optimizer, offloads.parameters):
        return OffloadSection(optimizer="cpu", parameters="cpu")
    return OffloadSection() if backend == "fsdp2" else offloads
