"""Count the messages that a rank sends in a step: calls and bytes of each collective, by the ranks of its group."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lorakit.parallel.group import AXES, Mesh

KINDS: Final = {  # how the name of an operation of c10d begins -> kind; reduce_scatter comes before reduce
    "allreduce": "all_reduce", "allgather": "all_gather", "reduce_scatter": "reduce_scatter", "alltoall": "all_to_all",
    "broadcast": "broadcast", "reduce": "reduce", "send": "send", "recv": "receive",
}  # fmt: skip
Message = tuple[str, tuple[int, ...]]
"""(kind, ranks of the group)"""
Counts = dict[str, dict[str, int]]
"""kind -> ``calls`` and ``bytes``"""


@final
class Collectives:
    """What this rank has sent: bytes are of the larger of input and output."""

    def __init__(self) -> None:
        self.calls: Counter[Message] = Counter()
        self.bytes: Counter[Message] = Counter()

    def counts(self, ranks: Collection[int] | None = None) -> Counts:
        """Return kind -> calls and bytes. ``ranks``: of groups of these ranks alone."""
        counts: Counts = {}
        for message in sorted(self.calls):
            kind, group = message
            if ranks is None or set(group) == set(ranks):
                total = counts.setdefault(kind, {"calls": 0, "bytes": 0})
                total["calls"] += self.calls[message]
                total["bytes"] += self.bytes[message]
        return counts

    def by_axis(self, mesh: Mesh) -> dict[str, Counts]:
        """Return what was sent along each axis."""
        # by kind too, because the ranks of `sequence` may be those of `replicas`
        return {
            axis: {
                kind: count
                for kind, count in self.counts(ranks).items()
                if (kind == "all_to_all") == (axis == "sequence")
            }
            for axis, ranks in ranks_by_axis(mesh).items()
        }

    def groups_of_no_axis(self, mesh: Mesh) -> list[list[int]]:
        """Return the ranks of each group that something was sent to, and that is no axis of the mesh."""
        groups = {ranks for _, ranks in self.calls if len(ranks) > 1}
        return sorted(map(list, groups - set(ranks_by_axis(mesh).values())))


@contextmanager
def count_collectives() -> Iterator[Collectives]:
    """Count what the block sends. From the second step of a run on: DeepSpeed prefetches only from there on."""
    counted = Collectives()
    with _Counter(counted):
        yield counted


def ranks_by_axis(mesh: Mesh) -> dict[str, tuple[int, ...]]:
    """Return the ranks that this one talks to, by axis. `data` is `replicas` here, unless ranks share lines."""
    groups = {"replicas": mesh.replicas, **{axis: getattr(mesh, axis) for axis in AXES}}
    return {
        name: tuple(sorted(dist.get_process_group_ranks(group.group)))
        for name, group in groups.items()
        if group.size > 1 and (name != "data" or group is not mesh.replicas)
    }


class _Counter(TorchDispatchMode):
    """Count the operations of torch.distributed (c10d), those too that DDP's C++ reducer and backward call."""

    def __init__(self, counted: Collectives) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counted = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.name().partition("::")[2].strip("_")  # such as `_allgather_base_`; others are a barrier
            kind = next((kind for prefix, kind in KINDS.items() if name.startswith(prefix)), None)
            if kind is not None and _tensors_in((args, kwargs)):
                message = (kind, _ranks_of(args))
                self._counted.calls[message] += 1
                # c10d: outputs first, then inputs
                self._counted.bytes[message] += max(_nbytes(args[0]), _nbytes(args[1:2]))
        return func(*args, **(kwargs or {}))


def _tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _nbytes(values: Any) -> int:
    return sum(tensor.nbytes for tensor in _tensors_in(values))


def _ranks_of(arguments: Iterable[Any]) -> tuple[int, ...]:
    """Return the ranks of the process group among an operation's arguments."""
    boxed = (a for a in arguments if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
    group = next(boxed, None)
    if group is None:
        return ()
    return tuple(sorted(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))))
