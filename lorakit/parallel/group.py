"""The processes of a run talking about small things: counts, flags, errors. Always on the CPU.

Every method is collective: all ranks call it, in the same order. With one process nothing is sent.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist

from lorakit.errors import LorakitError

T = TypeVar("T")


@final
class Group:
    """This process (``rank``) among ``size``."""

    def __init__(
        self, rank: int = 0, size: int = 1, local_rank: int = 0, group: dist.ProcessGroup | None = None
    ) -> None:
        self.rank, self.size, self.local_rank, self._group = rank, size, local_rank, group

    @property
    def is_rank_0(self) -> bool:
        """Whether this process writes the files and shows the progress."""
        return self.rank == 0

    def all_reduce_sum(self, *values: float) -> list[float]:
        """Each value, added over all ranks (float64)."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self._group)
        return tensor.tolist()

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return self.all_reduce_sum(float(flag))[0] > 0

    def all_gather(self, value: T) -> list[T]:
        """What each rank says, by rank. For small plain values."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def run_on_rank_0(self, work: Callable[[], T]) -> T:
        """What ``work`` returned on rank 0, on every rank.

        Raises:
            LorakitError: what it raised on rank 0, on every rank.
        """
        if self.size == 1:
            return work()
        if not self.is_rank_0:
            said: list[Any] = [None]
            dist.broadcast_object_list(said, src=0, group=self._group)
            good, result = said[0]
            if not good:
                raise result
            return result  # type: ignore[no-any-return]
        try:
            done = work()
        except LorakitError as problem:
            dist.broadcast_object_list([(False, problem)], src=0, group=self._group)
            raise
        dist.broadcast_object_list([(True, done)], src=0, group=self._group)
        return done

    def run_on_all(self, work: Callable[[], T]) -> T:
        """What ``work`` returns here, once it went well everywhere. It must not be collective itself.

        Raises:
            LorakitError: the first rank's problem, on every rank.
        """
        result, problem = None, None
        try:
            result = work()
        except LorakitError as mine:
            problem = mine
        if self.size == 1:
            if problem is not None:
                raise problem
            return result  # type: ignore[return-value]
        for rank, theirs in enumerate(self.all_gather(problem)):
            if theirs is not None:
                raise theirs if rank == self.rank else type(theirs)(f"rank {rank}: {theirs}")
        return result  # type: ignore[return-value]

    def local_rank_0_first(self, work: Callable[[], object]) -> None:
        """``work`` done by one process of each machine while the others wait. Errors as ``together``."""
        if self.size > 1:
            self.run_on_all(lambda: work() if self.local_rank == 0 else None)

    def check_same(self, what: str, facts: dict[str, Any]) -> None:
        """Passes when every rank has the same facts.

        Raises:
            LorakitError: on every rank, naming the differing facts and who has which.
        """
        differing = disagreements(self.all_gather(facts))
        if differing:
            raise LorakitError(
                f"the processes disagree on {what}:\n" + "\n".join(f"  {line}" for line in differing)
                + "\nGive every machine the same"
            )  # fmt: skip


def disagreements(everyone: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each fact that not all ranks share."""
    lines = []
    for key in dict.fromkeys(key for facts in everyone for key in facts):
        values = [facts.get(key) for facts in everyone]
        if any(value != values[0] for value in values):
            lines.append(f"{key}: " + ", ".join(f"rank {rank} {value!r}" for rank, value in enumerate(values)))
    return lines
