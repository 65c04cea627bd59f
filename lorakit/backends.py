"""The record of each backend. Recipe, engines, plan and `lorakit doctor` derive everything about a backend from it.

Adding a backend takes its record here and the file with its engine in `lorakit/parallel`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from torch import Tensor

BackendName = Literal["auto", "single", "ddp", "zero1", "zero2", "zero3", "fsdp2"]
Memory = Literal["cpu", "stream"]


@dataclass(frozen=True)
class Sizes:
    """The sizes that decide a backend's buffers, in bytes: of tensors, and of the recipe's messages.

    base, adapter: all frozen and all trainable tensors. value: mean bytes of one stored value of the base. largest: the
    largest frozen tensor. root, embedding, layers, layer: tensors outside the repeated layers, the gather group of the
    input embedding, all other groups, the largest of them. bucket, prefetch: `bucket_mb` and `prefetch_mb`.
    """

    num_ranks: int
    on_gpu: bool
    base: int
    adapter: int
    value: float
    largest: int
    root: int
    embedding: int
    layers: int
    layer: int
    bucket: int
    prefetch: int
    reshard_after_forward: bool

    @property
    def message(self) -> int:
        """Bytes of one message of gradients: a bucket, or the adapter if that is smaller."""
        return min(self.adapter, self.bucket)


@dataclass(frozen=True)
class Buffers:
    """Bytes of messages, copies and gathered tensors: always, before the first layer, in a layer, in the head."""

    resident: int = 0
    start: int = 0
    layer: int = 0
    head: int = 0


@dataclass(frozen=True)
class Backend:
    """How a backend spreads training over processes.

    engine: `<file in lorakit/parallel>.<class>`. axes: those of the mesh, besides `data`, that it goes with.
    optimizers: names that it goes with; None means all. optimizer_memory, base_memory: where it can store optimizer
    state and the base besides the computing device.
    """

    engine: str
    is_distributed: bool = True  # False: one process, whatever the recipe requests
    shards_base: bool = False
    shards_adapter: bool = False  # True if each rank stores a part of the adapter, and offloads it with the base
    shards_gradients: bool = False
    shards_optimizer: bool = False
    shard_dim: Callable[["Tensor", int], int] | None = None
    """(tensor, ranks) -> the dimension in which a tensor is sharded; None: flattened, in equal parts"""
    buffers: Callable[[Sizes], Buffers] = lambda sizes: Buffers()
    axes: tuple[str, ...] = ()
    optimizers: tuple[str, ...] | None = None
    optimizer_memory: tuple[Memory, ...] = ()
    base_memory: tuple[Memory, ...] = ()
    offloads_together: bool = False  # True: base and optimizer are offloaded both or not at all
    generates: bool = False  # True if every process can generate with the model as it is between steps
    counts_calls: bool = False  # True if ranks must call a layer equally often, because each call gathers its weights
    zero_stage: int | None = None  # DeepSpeed's stage; None: DeepSpeed does not run
    accelerate_variable: str | None = None  # Environment variable with which `accelerate launch` chooses this backend

    @property
    def package(self) -> str | None:
        """Optional package that the backend imports."""
        return None if self.zero_stage is None else "deepspeed"

    def shard_numel(self, tensor: "Tensor", num_ranks: int) -> int:
        """Return the most elements that one rank stores of a full tensor that will be sharded: those of rank 0."""
        if self.shard_dim is None:
            return math.ceil(tensor.numel() / num_ranks)
        dim = self.shard_dim(tensor, num_ranks)
        shape = tensor.shape
        return math.ceil(shape[dim] / num_ranks) * math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])


def _zero12_buffers(sizes: Sizes) -> Buffers:
    """The flat shard being updated, and two buckets: one is filled while the other is sent."""
    return Buffers(resident=sizes.adapter // sizes.num_ranks + 2 * sizes.message)


def _zero3_buffers(sizes: Sizes) -> Buffers:
    """The adapter's shard twice, as parameter and as float32 master, a bucket, and the base as it is gathered.

    Gathered are ``prefetch_mb`` and the largest tensor. Before the first layer they exist twice, as messages and as the
    tensors cut from the messages. Later they exist once, beside the message of the largest tensor. On CPUs each message
    exists once more, because gloo gathers into a copy of its own (measured: 158 MB above an output of 160), and frees
    it with the message. A single process gathers the largest tensor twice. DeepSpeed counts prefetched elements at two
    bytes each, so a float32 base has twice ``prefetch_mb`` and a 4-bit base about half.
    """
    resident = 2 * math.ceil(sizes.adapter / sizes.num_ranks) + sizes.message
    if sizes.num_ranks == 1:
        return Buffers(resident, 2 * sizes.largest, 2 * sizes.largest, 2 * sizes.largest)
    ahead = min(sizes.base, round(sizes.prefetch / 2 * sizes.value) + sizes.largest)
    copies = 1 if sizes.on_gpu else 2
    in_use = ahead + copies * sizes.largest
    return Buffers(resident, (1 + copies) * ahead, in_use, in_use)


def _fsdp2_buffers(sizes: Sizes) -> Buffers:
    """The root group, gathered from forward to the end of backward, and up to three layers.

    These are the layer in use, the next one's message, and forward's last, freed only when the next forward begins.
    """
    num_messages = 0 if sizes.num_ranks == 1 else 1
    all_layers = 0 if sizes.reshard_after_forward else sizes.layers + sizes.embedding
    messages = 2 * num_messages * sizes.layer
    return Buffers(
        start=sizes.root + (1 + num_messages) * sizes.embedding,
        layer=sizes.root + max(all_layers, sizes.layer) + messages,
        head=sizes.root + all_layers + messages,
    )


def _fsdp2_shard_dim(tensor: "Tensor", num_ranks: int) -> int:
    """Return 1, columns, for A (r, in) where its rows would be padded, else 0, rows.

    FSDP2 pads rows to a multiple of the ranks, which makes A of r 8 on 256 ranks 32 times as large in every message and
    in the optimizer. It shards columns only where all ranks get equally many.
    """
    if not tensor.requires_grad or tensor.dim() != 2:
        return 0
    rows, columns = tensor.shape
    return int(rows < columns and rows % num_ranks != 0 and columns % num_ranks == 0)


_zero: Final = partial(
    Backend, "zero.ZeroEngine", shards_optimizer=True, axes=("sequence",), optimizers=("adamw",),
    optimizer_memory=("cpu",), accelerate_variable="ACCELERATE_USE_DEEPSPEED",
)  # fmt: skip
BACKENDS: Final[Mapping[str, Backend]] = {
    "single": Backend("single.SingleEngine", is_distributed=False, base_memory=("stream",), generates=True),
    "ddp": Backend(  # the gradients are summed in one message, a flat copy of them
        "single.SingleEngine", buffers=lambda sizes: Buffers(resident=sizes.adapter),
        axes=("sequence", "pipeline", "tensor"), generates=True,
    ),
    "zero1": _zero(zero_stage=1, buffers=_zero12_buffers),
    "zero2": _zero(zero_stage=2, buffers=_zero12_buffers, shards_gradients=True),
    "fsdp2": Backend(
        "fsdp2.Fsdp2Engine", shards_base=True, shards_adapter=True, shards_gradients=True, shards_optimizer=True,
        shard_dim=_fsdp2_shard_dim, buffers=_fsdp2_buffers, axes=("sequence", "pipeline", "tensor"),
        optimizers=("adamw", "sgd"), optimizer_memory=("cpu",), base_memory=("cpu",), offloads_together=True,
        accelerate_variable="ACCELERATE_USE_FSDP",
    ),
    "zero3": _zero(
        zero_stage=3, buffers=_zero3_buffers, shards_gradients=True, shards_base=True, base_memory=("cpu",),
        counts_calls=True,
    ),
}  # fmt: skip
"""name in a recipe -> its record. Simplest first, the order in which a plan and `auto` try them: each divides at least
what those before it divide. fsdp2 is before zero3, because it needs no other package."""


def backends_with(has: Callable[[Backend], bool]) -> str:
    """Return the names of the backends for which `has` is True, as text: `single, ddp or fsdp2`."""
    *others, last = (name for name, backend in BACKENDS.items() if has(backend))
    return f"{', '.join(others)} or {last}" if others else last
