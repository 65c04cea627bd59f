"""What passes through a process in a step: copies for messages, split tensors that are whole for a while, traffic.

P: the base. A: the adapter in float32. N: processes. m: micro-batches of a process in a step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from lorakit.planning.model_shapes import ROOT, ModelShapes
from lorakit.planning.sharding import adapter_bytes, base_bytes
from lorakit.recipe import ParallelSection

BROADCAST_BYTES: Final = 2 * 250 * 2**20  # torch's DDP: two messages of the whole base under way while it is built
MEGABYTE: Final = 1_000_000


@dataclass(frozen=True)
class Gathered:
    """Bytes of split tensors that are whole for a while, in three phases of a micro-batch."""

    start: int = 0
    """Before the first layer; nothing else of the micro-batch is there yet."""
    layer: int = 0
    head: int = 0


@dataclass(frozen=True)
class Traffic:
    """What one process receives in a step: bytes and messages of the base, and of the adapter."""

    base_bytes: float
    adapter_bytes: float
    num_messages: float


def _bucket(shapes: ModelShapes, parallel: ParallelSection) -> int:
    """One message of gradients: ``bucket_mb``, or all of them if that is less."""
    return min(adapter_bytes(shapes), round(parallel.bucket_mb * MEGABYTE))


def ddp_messages(shapes: ModelShapes, num_ranks: int, parallel: ParallelSection) -> int:
    """A: buckets are copies of the gradients."""
    return adapter_bytes(shapes)


def zero12_messages(shapes: ModelShapes, num_ranks: int, parallel: ParallelSection) -> int:
    """A / N for the flat part that is updated, and two buckets, one filled while the other is sent."""
    return adapter_bytes(shapes) // num_ranks + 2 * _bucket(shapes, parallel)


def zero3_messages(shapes: ModelShapes, num_ranks: int, parallel: ParallelSection) -> int:
    """A / N for the flat part that is updated, and one bucket."""
    return adapter_bytes(shapes) // num_ranks + _bucket(shapes, parallel)


def zero3_gathered(shapes: ModelShapes, num_ranks: int, parallel: ParallelSection) -> Gathered:
    """``prefetch_mb`` of tensors ahead of use and L, the largest, together no more than the base.

    Before the first layer they are there twice, as the messages they came in and as the tensors cut from these; later
    once, with one message of L. Alone, two of L. DeepSpeed counts elements, two bytes each, so float32 has twice as
    many bytes, and packed weights about half.
    """
    itemsize = base_bytes(shapes) / sum(piece.numel for piece in shapes.frozen)
    largest = max(piece.nbytes for piece in shapes.frozen)
    if num_ranks == 1:
        return Gathered(2 * largest, 2 * largest, 2 * largest)
    ahead = min(base_bytes(shapes), round(parallel.prefetch_mb * MEGABYTE / 2 * itemsize) + largest)
    return Gathered(2 * ahead, ahead + largest, ahead + largest)


def fsdp2_gathered(shapes: ModelShapes, num_ranks: int, parallel: ParallelSection) -> Gathered:
    """R, the group of what belongs to no layer, is whole from forward to the end of backward.

    Beside it a layer G: in use, as the message of the next one, and as the last message of forward, which is let go
    of when the next forward begins. Without ``reshard_after_forward`` all layers stay.
    """
    groups = shapes.bytes_of_groups()
    root = groups.pop(ROOT, 0)
    layers = {name: size for name, size in groups.items() if not _is_embedding(shapes, name)}
    embedding = sum(groups.values()) - sum(layers.values())
    largest = max(layers.values(), default=0)
    messages = 0 if num_ranks == 1 else 1
    every = 0 if parallel.reshard_after_forward else sum(groups.values())
    return Gathered(
        root + (1 + messages) * embedding,
        root + max(every, largest) + 2 * messages * largest,
        root + every + 2 * messages * largest,
    )


def _is_embedding(shapes: ModelShapes, group: str) -> bool:
    return shapes.embedding is not None and shapes.embedding.startswith(f"{group}.")


def all_gather_traffic(with_adapter: bool) -> Callable[[ModelShapes, int, int], Traffic]:
    """Twice a micro-batch (N-1)/N of the base, and the adapter's gradients once a step."""

    def traffic(shapes: ModelShapes, num_ranks: int, micro_batches: int) -> Traffic:
        share, adapter = (num_ranks - 1) / num_ranks, adapter_bytes(shapes)
        groups = len(shapes.bytes_of_groups()) if with_adapter else len(shapes.frozen)
        again = adapter * 2 * micro_batches if with_adapter else adapter
        return Traffic(
            2 * micro_batches * share * base_bytes(shapes), share * (adapter + again), 2 * micro_batches * groups
        )

    return traffic


def all_reduce_traffic(times: float) -> Callable[[ModelShapes, int, int], Traffic]:
    """The adapter's gradients once a step: summed (twice their bytes in a ring), or summed and gathered."""

    def traffic(shapes: ModelShapes, num_ranks: int, micro_batches: int) -> Traffic:
        return Traffic(0.0, times * adapter_bytes(shapes) * (num_ranks - 1) / num_ranks, 2.0 * times)

    return traffic


def no_traffic(shapes: ModelShapes, num_ranks: int, micro_batches: int) -> Traffic:
    """One process sends nothing."""
    return Traffic(0.0, 0.0, 0.0)


def no_messages(shapes: ModelShapes, num_ranks: int, parallel: ParallelSection) -> int:
    """No copies."""
    return 0


def no_gather(shapes: ModelShapes, num_ranks: int, parallel: ParallelSection) -> Gathered:
    """Nothing is split."""
    return Gathered()


def no_bytes(shapes: ModelShapes) -> int:
    """No more than is held."""
    return 0


def broadcast_bytes(shapes: ModelShapes) -> int:
    """DDP sends the whole base once, in messages that are copies."""
    return min(base_bytes(shapes), BROADCAST_BYTES)
