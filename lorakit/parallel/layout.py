"""Measure the bytes that a rank really stores, and verify by them that the engine is the one the recipe requests.

A library can do less than it was configured for, without an error. Such a run ends here.
"""

from collections.abc import Iterable, Mapping, Sequence
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


def verify_layout(
    backend: str, num_processes: int, base_bytes: int, adapter_shards: Sequence[int], layout: Mapping[str, Any]
) -> None:
    """Raise RunError unless `Engine.layout` is that of the requested backend; without optimizer state before step 1.

    base_bytes: the most that a rank stores of the base. adapter_shards: elements of each adapter tensor, as a sharding
    backend has them.
    """
    facts = BACKENDS[backend]
    differences = []
    if layout["backend"] != backend:
        differences.append(f"it runs as {layout['backend']}")
    if (stored := layout["base_bytes"]) > base_bytes + SLACK_BYTES * facts.shards_base:
        differences.append(f"a process holds {stored:,} bytes of the base, {base_bytes:,} would be its part")
    part = sum(MOMENT_BYTES * numel + COUNTER_BYTES for numel in adapter_shards)
    if facts.shards_optimizer and (stored := layout["optimizer_bytes"]) > part + SLACK_BYTES:
        differences.append(f"a process holds {stored:,} bytes of optimizer state, {part:,} would be its part")
    if differences:
        raise RunError(
            f"parallel.backend: the recipe requests {backend} with {num_processes} processes, but the engine is"
            f" {layout['engine']}: {'; '.join(differences)}. Nothing was saved; this is lorakit's or its engine's"
            " mistake: choose another backend, and report it"
        )
