"""Exchange small values between the ranks of a run, always through the CPU: counts, flags, errors.

Every method is collective: all ranks call it, in the same order. With one process nothing is sent.
"""

import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from lorakit.errors import LorakitError

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
        outcome: list[Any] = [(None, None)]
        if self.is_rank_0:
            try:
                outcome = [(work(), None)]
            except LorakitError as own:  # other exceptions are mistakes of lorakit: they end the run by the watchdog
                outcome = [(None, own)]
        if self.size > 1:
            dist.broadcast_object_list(outcome, src=0, group=self.group)
        result, problem = outcome[0]
        if problem is not None:
            raise problem
        return result  # type: ignore[no-any-return]

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank, or raise the first rank's LorakitError on all. `work` must not be collective."""
        result: T | None = None
        problem: LorakitError | None = None
        try:
            result = work()
        except LorakitError as own:
            problem = own
        # exchanged before anything is raised: a rank that left here alone would leave the others waiting
        for rank, theirs in enumerate(self.all_gather(problem)):
            if theirs is not None:
                if rank != self.rank:
                    theirs.args = (f"rank {rank}: {theirs}",)
                raise theirs
        return result  # type: ignore[return-value]

    def run_once_per_machine(self, work: Callable[[], T]) -> T:
        """Run `work`, such as digests of a base, once on each machine, and return its small result everywhere."""
        if self.size == 1:
            return work()
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
            raise LorakitError(
                f"the processes disagree on {what}:\n"
                + "\n".join(f"  {line}" for line in differing)
                + "\nGive every machine the same"
            )


@final
class SentTensors(Mapping[str, Tensor]):
    """Tensors of rank 0, sent one at a time, in one order, so that no other rank has more than one in memory."""

    def __init__(self, group: Group, tensors: Mapping[str, Tensor] | None) -> None:
        """Send the names and shapes. tensors: on the CPU; None on the other ranks. Collective."""
        self._group = group
        self._tensors = tensors
        forms = None if tensors is None else {name: (each.shape, each.dtype) for name, each in tensors.items()}
        self._forms: Mapping[str, Any] = group.run_on_rank_0(lambda: forms or {})

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
