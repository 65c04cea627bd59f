"""Measure the bytes that a rank really stores, and verify by them that the engine is the one the recipe requests.

A library can do less than it was configured for, without an error. Such a run ends here.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from lorakit.backends import BACKENDS
from lorakit.errors import RunError
from lorakit.parallel._internals import shard_of

SLACK_BYTES: Final = 4096  # DeepSpeed pads its flat buffers
MOMENT_BYTES: Final = 2 * 4  # AdamW's two moments, in float32
COUNTER_BYTES: Final = 4  # AdamW's step count, for each tensor


def local_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes that these tensors take in this process. Shared memory counts once, a DTensor by its shard."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        # DTensors are recognised by a method, because importing their class takes 0.7 s that other backends save
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        for part in (local, shard_of(tensor)):  # under ZeRO-3 the shard is beside the tensor, which may be gathered
            if isinstance(part, Tensor) and part.device.type != "meta":
                sizes[part.data_ptr()] = max(part.nbytes, sizes.get(part.data_ptr(), 0)) if part.numel() else 0
    return sum(sizes.values())


@dataclass(frozen=True)
class ExpectedLayout:
    """The most that a rank stores of the base, and elements of each adapter tensor where the backend shards them."""

    backend: str
    num_processes: int
    base_bytes: int
    adapter_shards: Sequence[int]


def verify_layout(expected: ExpectedLayout, layout: Mapping[str, Any]) -> None:
    """Raise RunError unless `Engine.layout` is that of the requested backend; without optimizer state before step 1."""
    differences = list(_differences(expected, layout))
    if differences:
        raise RunError(
            f"parallel.backend: the recipe requests {expected.backend} with {expected.num_processes} processes, but the"
            f" engine is {layout['engine']}: {'; '.join(differences)}. Nothing was saved; this is lorakit's or its"
            " engine's mistake: choose another backend, and report it"
        )


def _differences(expected: ExpectedLayout, layout: Mapping[str, Any]) -> Iterator[str]:
    facts = BACKENDS[expected.backend]
    if layout["backend"] != expected.backend:
        yield f"it runs as {layout['backend']}"
    if layout["base_bytes"] > expected.base_bytes + SLACK_BYTES * facts.shards_base:
        yield f"a process holds {layout['base_bytes']:,} bytes of the base, {expected.base_bytes:,} would be its part"
    if facts.shards_optimizer:
        part = sum(MOMENT_BYTES * numel + COUNTER_BYTES for numel in expected.adapter_shards)
        if layout["optimizer_bytes"] > part + SLACK_BYTES:
            yield f"a process holds {layout['optimizer_bytes']:,} bytes of optimizer state, {part:,} would be its part"
