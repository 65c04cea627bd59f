"""Count the messages that a rank sends in one step: calls and bytes of each collective, by the ranks of its group.

run.json records the counts; tests/parallel compare them with what each backend and axis needs.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, final

from lorakit.parallel._internals import DispatchMode, ranks_of_operation, tensors_in

KINDS: Final = {  # how the name of an operation of c10d begins -> kind; reduce_scatter comes before reduce
    "allreduce": "all_reduce", "allgather": "all_gather", "reduce_scatter": "reduce_scatter", "alltoall": "all_to_all",
    "broadcast": "broadcast", "reduce": "reduce", "send": "send", "recv": "receive",
}  # fmt: skip
COUNTED_PASSES: Final = 2
Message = tuple[str, tuple[int, ...]]
"""(kind, ranks of the group)"""
Counts = dict[str, dict[str, int]]
"""kind -> ``calls`` and ``bytes``"""


@final
class Collectives:
    """The collectives of one step on this rank: calls and bytes by kind and group, of the larger of input and output.

    Counted in the second forward, backward and update, because DeepSpeed prefetches only from there on.
    """

    def __init__(self, num_ranks: int) -> None:
        self._passes = 0 if num_ranks > 1 else COUNTED_PASSES
        self._reported = num_ranks == 1
        self._calls: Counter[Message] = Counter()
        self._bytes: Counter[Message] = Counter()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the collectives of the pass inside the block, if it is one of the first two."""
        if self._passes >= COUNTED_PASSES:  # later passes go without: intercepting every operation costs time
            yield
            return
        self._passes += 1
        self._calls.clear()
        self._bytes.clear()
        with _CollectiveCounter(self._calls, self._bytes):
            yield

    def counts_are_new(self) -> bool:
        """True once: at the first call after the counts became final."""
        new = self._passes == COUNTED_PASSES and not self._reported
        self._reported = self._reported or new
        return new

    def counts(self, ranks: Collection[int] | None = None) -> Counts:
        """Return kind -> calls and bytes; empty before the first step. ``ranks``: of groups of these ranks alone."""
        counts: Counts = {}
        for message in sorted(self._calls):
            kind, group = message
            if ranks is None or set(group) == set(ranks):
                total = counts.setdefault(kind, {"calls": 0, "bytes": 0})
                total["calls"] += self._calls[message]
                total["bytes"] += self._bytes[message]
        return counts

    def by_axis(self, axes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Return the collectives along each axis (name -> its ranks), and the groups that are none of the axes."""
        # by kind too, because the ranks of `sequence` may be those of `replicas`
        along = {
            axis: {
                kind: count
                for kind, count in self.counts(ranks).items()
                if (kind == "all_to_all") == (axis == "sequence")
            }
            for axis, ranks in axes.items()
        }
        others = {ranks for ranks in self.groups() if len(ranks) > 1} - set(axes.values())
        return {"collectives_by_axis": along, "groups_of_no_axis": sorted(map(list, others))}

    def groups(self) -> set[tuple[int, ...]]:
        """Return the ranks of every group that something was sent to, sorted in each."""
        return {ranks for _, ranks in self._calls}


class _CollectiveCounter(DispatchMode):
    """Count the operations of torch.distributed (c10d), those too that DDP's C++ reducer and backward call."""

    def __init__(self, calls: Counter[Message], num_bytes: Counter[Message]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls
        self._bytes = num_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.name().partition("::")[2].strip("_")  # such as `_allgather_base_`; others are a barrier
            kind = next((kind for prefix, kind in KINDS.items() if name.startswith(prefix)), None)
            if kind is not None and tensors_in((args, kwargs)):
                message = (kind, ranks_of_operation(args))
                self._calls[message] += 1
                self._bytes[message] += max(_nbytes(args[0]), _nbytes(args[1:2]))  # c10d: outputs first, then inputs
        return func(*args, **(kwargs or {}))


def _nbytes(values: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(values))
