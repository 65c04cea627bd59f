"""Bytes of base, adapter and optimizer state on one rank. Each engine has its own sharding rule.

Every figure is rank 0's, because rank 0 has the largest shards.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from lorakit.planning.model_shapes import ModelShapes, TensorShape

FLOAT32_BELOW: Final = 4096  # elements: an 8-bit optimizer stores the moments of a smaller tensor in float32
BLOCK: Final = 256  # values of an 8-bit moment that share a scale
CODE_TABLE_BYTES: Final = 2 * 256 * 4  # the float32 value of each 8-bit code, one table for each moment
PAGED_FROM: Final = 100_000  # elements: the moments of a smaller tensor are not paged
COUNTER_BYTES: Final = 4
NUM_MOMENTS: Final = {"adamw": 2, "sgd": 1, "muon": 1, "lion": 1}
"""optimizer -> float32 values of state for each value of a tensor"""

ShardRule = Callable[[TensorShape, int], int]
"""(tensor, N) -> bytes of rank 0's shard."""


def unsharded(tensor: TensorShape, num_ranks: int) -> int:
    """Return the bytes of the full tensor: every rank has a copy."""
    return tensor.nbytes


def flat_shard(tensor: TensorShape, num_ranks: int) -> int:
    """Return the bytes of ceil(elements / N) elements: the flattened tensor in equal shards."""
    return math.ceil(tensor.numel / num_ranks) * tensor.itemsize


def row_shard(tensor: TensorShape, num_ranks: int) -> int:
    """Return the bytes of ceil(rows / N) rows."""
    return math.ceil(tensor.shape[0] / num_ranks) * math.prod(tensor.shape[1:]) * tensor.itemsize


def unsharded_and_flat_shard(tensor: TensorShape, num_ranks: int) -> int:
    """Return the bytes of the full tensor plus this rank's flat shard of the same tensor."""
    return tensor.nbytes + flat_shard(tensor, num_ranks)


def shard_bytes(tensors: tuple[TensorShape, ...], rule: ShardRule, num_ranks: int) -> int:
    """Return the bytes of rank 0's shards of several tensors."""
    return sum(rule(tensor, num_ranks) for tensor in tensors)


def adapter_bytes(shapes: ModelShapes) -> int:
    """Return A, the bytes of all trainable tensors."""
    return shard_bytes(shapes.adapter, unsharded, 1)


def base_bytes(shapes: ModelShapes) -> int:
    """Return P, the bytes of all frozen tensors."""
    return shard_bytes(shapes.frozen, unsharded, 1)


@dataclass(frozen=True)
class OptimizerStateBytes:
    """Bytes of optimizer state: ``resident`` on the computing device, ``paged`` to host memory under pressure."""

    resident: int
    paged: int = 0


def optimizer_state_bytes(
    name: str, shapes: ModelShapes, rule: ShardRule, num_ranks: int, num_counters: int
) -> OptimizerStateBytes:
    """Return the state of rank 0 under an optimizer named as in recipes.

    ``adamw`` and ``adafactor`` store step counters as tensors, the others count in Python or not at all.
    """
    if name in NUM_MOMENTS:
        moments = sum(NUM_MOMENTS[name] * rule(tensor, num_ranks) for tensor in shapes.adapter)
        return OptimizerStateBytes(moments + COUNTER_BYTES * num_counters * (name == "adamw"))
    if name == "adafactor":
        factors = sum(_factor_bytes(tensor) for tensor in shapes.adapter)
        return OptimizerStateBytes(factors + COUNTER_BYTES * num_counters)
    eight_bit, paged = name.endswith("8bit"), name.startswith("paged")
    sizes = [(tensor.numel >= PAGED_FROM and paged, _moment_bytes(tensor, eight_bit)) for tensor in shapes.adapter]
    tables = CODE_TABLE_BYTES if eight_bit and any(t.numel >= FLOAT32_BELOW for t in shapes.adapter) else 0
    return OptimizerStateBytes(
        resident=sum(size for is_paged, size in sizes if not is_paged) + tables,
        paged=sum(size for is_paged, size in sizes if is_paged),
    )


def _factor_bytes(tensor: TensorShape) -> int:
    """Return the bytes of a second moment in float32: of a matrix its means over rows and over columns."""
    if len(tensor.shape) < 2:
        return 4 * tensor.numel
    *first, rows, columns = tensor.shape
    return 4 * math.prod(first) * (rows + columns)


def _moment_bytes(tensor: TensorShape, eight_bit: bool) -> int:
    """Return the bytes of two moments, in 8 bits with a float32 scale per block, or in float32."""
    if eight_bit and tensor.numel >= FLOAT32_BELOW:
        return 2 * (tensor.numel + 4 * math.ceil(tensor.numel / BLOCK))
    return 2 * 4 * tensor.numel
