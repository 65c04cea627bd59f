"""What is really there: the bytes one process holds and the messages one step sends, counted rather than assumed."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reduce_scatter": "reduce_scatter", "broadcast": "broadcast",
    "reduce": "reduce", "alltoall": "all_to_all",
}  # fmt: skip


@final
class Collectives:
    """Counts the collectives of a step: calls and bytes of the largest side, by kind and dtype size.

    The first two steps are counted, and the second is kept: the first may still be learning what comes when. One rank
    sends nothing.
    """

    def __init__(self, num_ranks: int) -> None:
        self._steps, self._told = (0, False) if num_ranks > 1 else (2, True)
        self._calls: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    @contextmanager
    def of_one_step(self) -> Iterator[None]:
        if self._steps >= 2:
            yield
            return
        self._steps += 1
        self._calls.clear()
        self._bytes.clear()
        with _Count(self._calls, self._bytes):
            yield

    def just_counted(self) -> bool:
        """Once, after the step whose counts are kept."""
        counted, self._told = self._steps == 2 and not self._told, self._told or self._steps == 2
        return counted

    def counts(self) -> dict[str, dict[str, int]]:
        """kind -> calls and bytes; empty before the first step."""
        return {kind: {"calls": self._calls[kind], "bytes": self._bytes[kind]} for kind in sorted(self._calls)}


class _Count(TorchDispatchMode):
    """Sees every operation that is dispatched, those of c10d among them, also inside backward."""

    def __init__(self, calls: Counter[str], sizes: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls, self._sizes = calls, sizes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            kind = _kind(func._opname)
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if kind is not None and tensors:
                self._calls[kind] += 1
                self._sizes[kind] += max(_bytes(args[0]), _bytes(args[1:2]))
        return func(*args, **(kwargs or {}))


def _kind(name: str) -> str | None:
    plain = name.strip("_").replace("_base", "").removesuffix("_into_tensor_coalesced").removesuffix("_coalesced")
    for start in ("allreduce", "allgather", "reduce_scatter", "alltoall", "broadcast", "reduce"):
        if plain.startswith(start):
            return KINDS[start]
    return None


def _bytes(values: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def bytes_held(tensors: Iterable[Any]) -> int:
    """Bytes of these tensors in this process, each memory once; a shard counts its own part only."""
    found: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if isinstance(local, Tensor) and local.device.type != "meta":
            found[local.data_ptr()] = max(local.nbytes, found.get(local.data_ptr(), 0)) if local.numel() else 0
    return sum(found.values())


def process_group_name(group: torch.distributed.ProcessGroup | None = None) -> str:
    """nccl, gloo, mpi: how the processes really talk."""
    return str(torch.distributed.get_backend(group))
