"""Is the engine what the recipe asked for? Judged by what is held and sent, not by what it is called.

A ZeRO-3 run that holds a whole base, or DDP behind another name, ends here instead of training with something else.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from lorakit.errors import RunError

SPLITS_BASE: Final = {"zero3", "fsdp2"}
SPLITS_OPTIMIZER: Final = {"zero1", "zero2", "zero3", "fsdp2"}
SLACK_BYTES: Final = 4096  # flat buffers are padded, and every tensor's steps are counted


@dataclass(frozen=True)
class Expected:
    """Bytes of everything together, and of the part of the base that one of ``num_ranks`` may hold."""

    backend: str
    num_ranks: int
    base_bytes: int
    adapter_bytes: int
    base_part_bytes: int


def verify_layout(expected: Expected, observed: Mapping[str, Any]) -> None:
    """Passes when engine, number of processes and what this one holds of the base are as asked.

    Raises:
        RunError: naming what was asked and what is there.
    """
    _refuse(expected, observed, _layout_problems(expected, observed))


def verify_step(expected: Expected, observed: Mapping[str, Any]) -> None:
    """Passes when the messages of a step and the optimizer's state are those of the backend asked for.

    Raises:
        RunError: naming what was asked and what is there.
    """
    _refuse(expected, observed, _step_problems(expected, observed))


def _refuse(expected: Expected, observed: Mapping[str, Any], problems: Iterator[str]) -> None:
    found = list(problems)
    if found:
        raise RunError(
            f"parallel.backend: {expected.backend} with {expected.num_ranks} processes was asked for, and"
            f" {observed['engine']} is not that: {'; '.join(found)}. Nothing was saved; this is lorakit's or its"
            " engine's mistake: choose another backend, and report it"
        )


def _layout_problems(expected: Expected, observed: Mapping[str, Any]) -> Iterator[str]:
    if observed["backend"] != expected.backend:
        yield f"it works as {observed['backend']}"
    if observed["world_size"] != expected.num_ranks:
        yield f"{observed['world_size']} processes take part"
    split = expected.backend in SPLITS_BASE
    limit = expected.base_part_bytes
    if observed["base_bytes"] > limit + SLACK_BYTES * split:
        yield f"a process holds {observed['base_bytes']:,} bytes of the base, {limit:,} would be its part"


def _step_problems(expected: Expected, observed: Mapping[str, Any]) -> Iterator[str]:
    if expected.num_ranks == 1:
        return
    sent = observed["collectives_of_a_step"]
    gathered = sent.get("all_gather", {}).get("bytes", 0)
    added = sum(sent.get(kind, {}).get("bytes", 0) for kind in ("all_reduce", "reduce_scatter", "reduce"))
    if added < expected.adapter_bytes:
        yield f"gradients of {expected.adapter_bytes:,} bytes should meet in a step, {added:,} bytes do"
    if added > 2 * expected.adapter_bytes + SLACK_BYTES * expected.num_ranks:
        yield f"only the adapter's {expected.adapter_bytes:,} bytes of gradients should meet, {added:,} bytes do"
    if expected.backend in SPLITS_BASE and gathered < expected.base_bytes:
        yield f"the base's {expected.base_bytes:,} bytes should be gathered in a step, {gathered:,} are"
    if expected.backend in SPLITS_OPTIMIZER:
        part = 2 * expected.adapter_bytes / expected.num_ranks
        if observed["optimizer_bytes"] > 1.5 * part + 16 * SLACK_BYTES:
            held = observed["optimizer_bytes"]
            yield f"a process holds {held:,} bytes of optimizer state, {part:,.0f} would be its part"
