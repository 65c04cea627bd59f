"""Verify that the engine is the one the recipe requested, by the bytes it stores and sends.

accelerate can return another engine without an error, such as DDP for DeepSpeed. Such a run ends here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from lorakit.errors import RunError
from lorakit.parallel.messages import ByKind, Messages

SHARDS_BASE: Final = {"zero3", "fsdp2"}
SHARDS_OPTIMIZER: Final = {"zero1", "zero2", "zero3", "fsdp2"}
SUMS_EVERY_MICRO_BATCH: Final = {"zero2", "zero3"}
"""DeepSpeed stores no full gradient, so it sums those of each micro-batch; others sum those of a step"""
SLACK_BYTES: Final = 4096  # flat buffers are padded, and AdamW stores a step count for every tensor


@dataclass(frozen=True)
class ExpectedLayout:
    """The requested backend, and the bytes that follow from it.

    num_processes: all. num_ranks: those with the same part of the model. base_bytes, adapter_bytes: of that part, full
    size. resident_base_bytes: the most of the base on one rank.
    """

    backend: str
    num_processes: int
    num_ranks: int
    base_bytes: int
    adapter_bytes: int
    resident_base_bytes: int


def verify_layout(expected: ExpectedLayout, layout: Mapping[str, Any]) -> None:
    """Return if backend, number of processes and this rank's bytes of the base are the expected ones.

    layout: the result of `Engine.layout`.

    Raises:
        RunError: with the requested backend and every difference.
    """
    _refuse(expected, layout, _layout_problems(expected, layout))


def verify_step(
    expected: ExpectedLayout, bounds: Mapping[str, tuple[ByKind, ByKind]], layout: Mapping[str, Any]
) -> None:
    """Return if the collectives of a step and the optimizer's bytes are those of the requested backend and axes.

    bounds: axis -> the least and the most of each kind of message along it.

    Raises:
        RunError: with the requested backend and every difference.
    """
    problems = [*_step_problems(expected, layout)]
    for axis, (least, most) in bounds.items():
        problems += _message_problems(axis, least, most, layout["collectives_by_axis"].get(axis, {}))
    _refuse(expected, layout, iter(problems))


def _refuse(expected: ExpectedLayout, layout: Mapping[str, Any], problems: Iterator[str]) -> None:
    differences = list(problems)
    if differences:
        raise RunError(
            f"parallel.backend: {expected.backend} with {expected.num_processes} processes was asked for, and"
            f" {layout['engine']} is not that: {'; '.join(differences)}. Nothing was saved; this is lorakit's or its"
            " engine's mistake: choose another backend, and report it"
        )


def _layout_problems(expected: ExpectedLayout, layout: Mapping[str, Any]) -> Iterator[str]:
    if layout["backend"] != expected.backend:
        yield f"it works as {layout['backend']}"
    if layout["world_size"] != expected.num_processes:
        yield f"{layout['world_size']} processes take part"
    shards_base = expected.backend in SHARDS_BASE
    limit = expected.resident_base_bytes
    if layout["base_bytes"] > limit + SLACK_BYTES * shards_base:
        yield f"a process holds {layout['base_bytes']:,} bytes of the base, {limit:,} would be its part"


def _step_problems(expected: ExpectedLayout, layout: Mapping[str, Any]) -> Iterator[str]:
    if layout["groups_of_no_axis"]:
        yield f"something is sent among ranks {layout['groups_of_no_axis']}, which no axis of {layout['mesh']} joins"
    if expected.num_ranks == 1:
        return
    sent = layout["collectives_by_axis"]["tokens"]  # gradients and the parts of the base belong to this axis
    gathered = sent.get("all_gather", {}).get("bytes", 0)
    reduced = sum(sent.get(kind, {}).get("bytes", 0) for kind in ("all_reduce", "reduce_scatter", "reduce"))
    if reduced < expected.adapter_bytes:
        yield f"gradients of {expected.adapter_bytes:,} bytes should meet in a step, {reduced:,} bytes do"
    # more would mean that the frozen base's gradients are computed and reduced too
    num_sums = layout["micro_batches"] if expected.backend in SUMS_EVERY_MICRO_BATCH else 1
    if reduced > (num_sums + 1) * expected.adapter_bytes + SLACK_BYTES * expected.num_ranks:
        yield f"only the adapter's {expected.adapter_bytes:,} bytes of gradients should meet, {reduced:,} bytes do"
    if expected.backend in SHARDS_BASE and gathered < expected.base_bytes:
        yield f"the base's {expected.base_bytes:,} bytes should be gathered in a step, {gathered:,} are"
    if expected.backend in SHARDS_OPTIMIZER:
        shard = 2 * expected.adapter_bytes / expected.num_ranks  # AdamW's two moments, float32 as the adapter
        resident = layout["optimizer_bytes"]
        if resident > 1.5 * shard + 16 * SLACK_BYTES:
            yield f"a process holds {resident:,} bytes of optimizer state, {shard:,.0f} would be its part"


def _message_problems(axis: str, least: ByKind, most: ByKind, sent: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Yield the differences between what was sent along an axis and what its layers need."""
    none = Messages(0, 0)
    for kind in sorted({*most, *sent}):
        low, high = least.get(kind, none), most.get(kind, none)
        calls, num_bytes = (sent.get(kind, {}).get(key, 0) for key in ("calls", "bytes"))
        if not (low.calls <= calls <= high.calls and low.num_bytes <= num_bytes <= high.num_bytes):
            yield (
                f"along the axis `{axis}` layers need {_range(low.calls, high.calls)} messages of the kind {kind} in a"
                f" step, {_range(low.num_bytes, high.num_bytes)} bytes, and {calls:,} of {num_bytes:,} bytes are sent"
            )


def _range(low: float, high: float) -> str:
    low = max(0.0, low)
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"
