"""The ranks of a run, all of them or those along one named axis of its mesh, and what they exchange.

Counts, flags and errors are sent through the CPU, tensors from where they are. Every method that sends is collective:
all ranks call it, in the same order. With one process no small value is sent.

Whatever scales a loss, cuts batches, seeds dropout or counts rows names the axis it means, and never the number of all
ranks: with an axis beside `data`, those are different numbers.
"""

import math
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from lorakit.errors import LorakitError

if TYPE_CHECKING:
    from lorakit.recipe import ParallelSection

T = TypeVar("T")


@final
@dataclass(frozen=True, eq=False)
class Group:
    """The ranks of a run. group, device_group: for tensors on the CPU, and where the model computes; None: default."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    group: dist.ProcessGroup | None = None
    device_group: dist.ProcessGroup | None = None

    @property
    def is_rank_0(self) -> bool:
        """True if this process writes the files and shows the progress."""
        return self.rank == 0

    def all_reduce_sum(self, *values: float) -> list[float]:
        """Return each value summed over all ranks, in float64: token counts stay exact up to 2**53."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.group)
        return tensor.tolist()

    def any(self, flag: bool) -> bool:
        """True if the flag is True on any rank."""
        return self.all_reduce_sum(float(flag))[0] > 0

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of ranks. For small plain values."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def part(self, count: int) -> range:
        """Return the indices of this rank's part of ``count`` items: neighbours, as evenly as they divide."""
        counts = even_counts(count, self.size)
        start = sum(counts[: self.rank])
        return range(start, start + counts[self.rank])

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, in a new one, where the model computes."""
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.device_group)
        return total

    def maximum(self, tensor: Tensor) -> Tensor:
        """Return the largest value of the ranks at each index; overwrites the tensor, where the model computes."""
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.device_group)
        return tensor

    def concatenated(self, part: Tensor, dim: int, count: int) -> Tensor:
        """Return the ranks' parts side by side: ``count`` rows or columns, of which ``part`` has this rank's."""
        counts = even_counts(count, self.size)
        own = part.movedim(dim, 0)
        filling = own.new_zeros(counts[0] - len(own), *own.shape[1:])  # a message has one size for all ranks
        sent = torch.cat([own, filling]).contiguous()
        received = own.new_empty(self.size * counts[0], *own.shape[1:])
        dist.all_gather_into_tensor(received, sent, group=self.device_group)
        parts = [each[:size] for each, size in zip(received.split(counts[0]), counts, strict=True)]
        return torch.cat(parts).movedim(0, dim).contiguous()

    def all_gather_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of all ranks, by name. Of a name that several have, the last one's. All on the CPU."""
        if self.size == 1:
            return dict(tensors)
        merged: dict[str, Tensor] = {}
        shapes = self.all_gather([(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()])
        for rank, entries in enumerate(shapes):
            for name, shape, dtype in entries:
                merged[name] = tensors[name].contiguous() if rank == self.rank else torch.empty(shape, dtype=dtype)
                dist.broadcast(merged[name], group=self.group, group_src=rank)
        return merged

    def run_on_rank_0(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result on every rank, or raise its LorakitError there."""
        outcome: list[Any] = [_outcome(work) if self.is_rank_0 else None]
        if self.size > 1:
            dist.broadcast_object_list(outcome, src=0, group=self.group)
        result, problem = outcome[0]
        if problem is not None:
            raise problem
        return result

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank, or raise the first rank's LorakitError on all. `work` must not be collective."""
        result, problem = _outcome(work)
        # exchanged before anything is raised: a rank that left here alone would leave the others waiting
        for rank, theirs in enumerate(self.all_gather(problem)):
            if theirs is not None:
                if rank != self.rank:
                    theirs.args = (f"rank {rank}: {theirs}",)
                raise theirs
        return result  # type: ignore[return-value]

    def run_once_per_machine(self, work: Callable[[], T]) -> T:
        """Run `work`, such as digests of a base, once on each machine, and return its small result everywhere."""
        host = socket.gethostname()
        own = self.run_on_all(lambda: [work()] if self.local_rank == 0 else [])
        # of several machines with one name (containers), the last that begins before this rank: ranks go node by node
        before = self.all_gather((host, own))[: self.rank + 1]
        results = [result for name, of_rank in before if name == host for result in of_rank]
        missing = self.run_on_all(lambda: [] if results else [work()])
        return (results or missing)[-1]

    def check_same(self, what: str, facts: dict[str, Any]) -> None:
        """Raise LorakitError on every rank unless all have the same facts, with those that differ and their values."""
        by_rank = self.all_gather(facts)
        differing = []
        for key in dict.fromkeys(key for each in by_rank for key in each):
            values = [each.get(key) for each in by_rank]
            if any(value != values[0] for value in values):
                differing.append(f"{key}: " + ", ".join(f"rank {rank} {value!r}" for rank, value in enumerate(values)))
        if differing:
            lines = "\n  ".join(differing)
            raise LorakitError(f"the processes disagree on {what}:\n  {lines}\nGive every machine the same")


def _outcome(work: Callable[[], T]) -> tuple[T | None, LorakitError | None]:
    """Return the result of `work`, or its LorakitError."""
    try:
        return work(), None
    except LorakitError as problem:  # other exceptions are mistakes of lorakit: they end the run by the watchdog
        return None, problem


def even_counts(count: int, num_ranks: int) -> list[int]:
    """Return how many of ``count`` neighbouring items each rank has: as evenly as they divide, the first ranks more."""
    return [count // num_ranks + (rank < count % num_ranks) for rank in range(num_ranks)]


@final
class SentTensors(Mapping[str, Tensor]):
    """Tensors of rank 0, sent one at a time, in one order, so that no other rank has more than one in memory."""

    def __init__(self, group: Group, tensors: Mapping[str, Tensor] | None) -> None:
        """Send the names and shapes. tensors: on the CPU; None on the other ranks. Collective."""
        self._group = group
        self._tensors = tensors
        forms = {name: (each.shape, each.dtype) for name, each in (tensors or {}).items()}
        self._forms: Mapping[str, Any] = group.run_on_rank_0(lambda: forms)

    def __getitem__(self, name: str) -> Tensor:
        shape, dtype = self._forms[name]
        tensor = torch.empty(shape, dtype=dtype) if self._tensors is None else self._tensors[name].contiguous()
        if self._group.size > 1:
            dist.broadcast(tensor, group=self._group.group, group_src=0)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._forms)

    def __len__(self) -> int:
        return len(self._forms)


AXES: Final = ("data", "pipeline", "sequence", "tensor")
"""from slowest to fastest: neighbouring ranks, on one machine, differ in the last axes first"""


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run."""

    data: Group  # ranks with other rows
    replicas: Group
    """ranks with other tokens and the same part of the model, `data` and `sequence` together: gradients and counts are
    summed over them, and a sharded base is sharded over them"""
    pipeline: Group = field(default_factory=Group)  # ranks with other layers, in the layers' order
    pipeline_backward: Group = field(default_factory=Group)
    """the ranks of `pipeline`, for messages against the layers' order"""
    grid: Tensor = field(default_factory=lambda: torch.arange(1).view(1, 1, 1, 1))  # all ranks, by axes
    sequence: Group = field(default_factory=Group)  # ranks with other tokens of the same rows
    tensor: Group = field(default_factory=Group)  # ranks with other parts of each weight

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks along each axis."""
        return {axis: getattr(self, axis).size for axis in AXES}


def make_mesh(world: Group, section: "ParallelSection") -> Mesh:
    """Return the mesh of all ranks, with the sizes of a `parallel` section. Collective."""
    timeout = message_timeout(section)
    grid = torch.arange(world.size).view(-1, section.pipeline, section.sequence, section.tensor)
    data = _make_group(world, grid, ("data",), timeout)
    return Mesh(
        data=data,
        replicas=data if section.sequence == 1 else _make_group(world, grid, ("data", "sequence"), timeout),
        **{axis: _make_group(world, grid, (axis,), timeout) for axis in AXES[1:]},
        pipeline_backward=_make_group(world, grid, ("pipeline",), timeout),
        grid=grid,
    )


def message_timeout(parallel: "ParallelSection") -> timedelta:
    """Return how long torch waits while the groups form, before the watchdog runs."""
    return timedelta(seconds=parallel.stuck_seconds + 60)


def _make_group(world: Group, grid: Tensor, axes: Sequence[str], timeout: timedelta) -> Group:
    """Return the group of the ranks that differ from this one along some axes alone. grid: ranks by axes."""
    along = [AXES.index(axis) for axis in axes]
    rows = grid.movedim(along, list(range(-len(axes), 0))).reshape(-1, math.prod(grid.shape[index] for index in along))
    if rows.shape[1] in (1, world.size):
        return Group() if rows.shape[1] == 1 else world
    device_group, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout)
    group = device_group
    if dist.get_backend() != "gloo":  # nccl sends tensors of GPUs only, and counts are on the CPU
        group, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout, "gloo")
    return Group(dist.get_rank(group), rows.shape[1], group=group, device_group=device_group)
