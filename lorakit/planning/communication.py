"""Bytes that pass through one process in a step: message buffers, gathered tensors, traffic.

P: bytes of the base. A: bytes of the adapter in float32. N: processes. m: micro-batches of a process in a step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from lorakit.planning.model_shapes import ROOT, ModelShapes
from lorakit.planning.sharding import adapter_bytes, base_bytes
from lorakit.recipe import ParallelSection

BROADCAST_BYTES: Final = 2 * 250 * 2**20  # DDP broadcasts the base at start, in messages of 250 MiB, two at a time
MEGABYTE: Final = 1_000_000


@dataclass(frozen=True)
class Gathered:
    """Bytes of sharded tensors while they are gathered, in three phases of a micro-batch."""

    start: int = 0
    """Before the first layer, when no activation exists yet."""
    layer: int = 0
    head: int = 0


@dataclass(frozen=True)
class Traffic:
    """Bytes of base and adapter that one process receives in a step, and the number of messages."""

    base_bytes: float
    adapter_bytes: float
    num_messages: float


def _bucket(shapes: ModelShapes, parallel: ParallelSection) -> int:
    """Return the bytes of one gradient message: ``bucket_mb``, or A if A is smaller."""
    return min(adapter_bytes(shapes), round(parallel.bucket_mb * MEGABYTE))


def ddp_messages(shapes: ModelShapes, num_ranks: int, parallel: ParallelSection) -> int:
    """Return A: DDP's buckets are copies of the gradients."""
    return adapter_bytes(shapes)


def zero12_messages(shapes: ModelShapes, num_ranks: int, parallel: ParallelSection) -> int:
    """Return A / N for the flat shard being updated, plus two buckets: one is filled while the other is sent."""
    return adapter_bytes(shapes) // num_ranks + 2 * _bucket(shapes, parallel)


def zero3_messages(shapes: ModelShapes, num_ranks: int, parallel: ParallelSection) -> int:
    """Return A / N for the flat shard being updated, plus one bucket."""
    return adapter_bytes(shapes) // num_ranks + _bucket(shapes, parallel)


def zero3_gathered(shapes: ModelShapes, num_ranks: int, parallel: ParallelSection, *, on_gpu: bool) -> Gathered:
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


def fsdp2_gathered(shapes: ModelShapes, num_ranks: int, parallel: ParallelSection, *, on_gpu: bool) -> Gathered:
    """Return the bytes gathered under FSDP2: R plus up to three layers.

    R, the root group of all tensors outside the layers, stays gathered from forward to the end of backward. The layers
    are the layer in use, the message of the next layer, and the last message of forward, which FSDP2 frees when the
    next forward begins. Without ``reshard_after_forward`` all layers stay gathered.
    """
    groups = shapes.bytes_of_groups()
    root = groups.pop(ROOT, 0)
    layers = {name: size for name, size in groups.items() if not _is_embedding(shapes, name)}
    embedding = sum(groups.values()) - sum(layers.values())
    largest = max(layers.values(), default=0)
    num_messages = 0 if num_ranks == 1 else 1
    unsharded = 0 if parallel.reshard_after_forward else sum(groups.values())
    return Gathered(
        start=root + (1 + num_messages) * embedding,
        layer=root + max(unsharded, largest) + 2 * num_messages * largest,
        head=root + unsharded + 2 * num_messages * largest,
    )


def _is_embedding(shapes: ModelShapes, group: str) -> bool:
    return shapes.embedding is not None and shapes.embedding.startswith(f"{group}.")


def broadcast_bytes(shapes: ModelShapes) -> int:
    """Return the bytes of DDP's message buffers while the base is broadcast at start."""
    return min(base_bytes(shapes), BROADCAST_BYTES)


def all_gather_traffic(with_adapter: bool) -> Callable[[ModelShapes, int, int], Traffic]:
    """Return the traffic rule: (N-1)/N of the base twice a micro-batch.

    ``with_adapter``: the adapter is gathered with the base, one message for each group instead of each tensor, and its
    gradients meet once a step. Otherwise its gradients meet in every micro-batch, and it is gathered once a step.
    """

    def traffic(shapes: ModelShapes, num_ranks: int, micro_batches: int) -> Traffic:
        share, adapter = (num_ranks - 1) / num_ranks, adapter_bytes(shapes)
        num_groups = len(shapes.bytes_of_groups()) if with_adapter else len(shapes.frozen)
        times = 2 * micro_batches + 1 if with_adapter else micro_batches + 1
        return Traffic(
            base_bytes=2 * micro_batches * share * base_bytes(shapes),
            adapter_bytes=share * times * adapter,
            num_messages=2 * micro_batches * num_groups,
        )

    return traffic


def all_reduce_traffic(*, gathers: bool, every_micro_batch: bool = False) -> Callable[[ModelShapes, int, int], Traffic]:
    """Return the traffic rule: 2 (N-1)/N of the adapter's gradients in a ring, once a step or in ``every_micro_batch``.

    ``gathers``: (N-1)/N of the updated parameters are gathered besides.
    """

    def traffic(shapes: ModelShapes, num_ranks: int, micro_batches: int) -> Traffic:
        times = 2.0 * (micro_batches if every_micro_batch else 1) + gathers
        return Traffic(0.0, times * adapter_bytes(shapes) * (num_ranks - 1) / num_ranks, 2.0 * times)

    return traffic
