"""What two processes send in a step when each holds half of the base (C12): counted, not timed.

    python -m benchmarks.gathers [--keep]

Two gathers of the base, one for forward and one for backward; no reduce-scatter of it; the adapter's gradients once.
"""

from pathlib import Path
from typing import Any

import torch

from benchmarks.collectives import count_collectives
from benchmarks.machine import program, run_ranks, scratch, table
from benchmarks.models import SHAPES, make_base
from benchmarks.ranks import prepared
from benchmarks.rows import packed, random_rows

SHAPE = "tiny"
VOCABULARY = SHAPES[SHAPE]["vocab_size"]
BACKENDS = ("zero3", "fsdp2")


def rank(backend: str, base: str) -> None:
    """One of the processes: two steps; the first process prints what was sent in the second."""
    with prepared(Path(base), backend=backend, processes=2) as ready:
        engine = ready.engine
        for step in range(2):
            with count_collectives() as sent:
                engine.step(step, [packed(random_rows(VOCABULARY, [256] * 4, 2 * step + engine.group.rank))])
        ready.report(base_bytes=ready.base_bytes, adapter_bytes=ready.adapter_bytes, sent=sent.counts())


def measure() -> dict[str, Any]:
    """Each backend once."""
    base = make_base(scratch(), SHAPE, torch.float32)
    found: dict[str, Any] = {"shape": SHAPE}
    for backend in BACKENDS:
        found[backend] = run_ranks("benchmarks.gathers", 2, backend, str(base))
    return found


def rates(result: dict[str, Any]) -> dict[str, float]:
    """The figures that the target speaks of."""
    found = {}
    for backend in BACKENDS:
        sent, base, adapter = (result[backend][key] for key in ("sent", "base_bytes", "adapter_bytes"))
        added = sum(sent.get(kind, {}).get("bytes", 0) for kind in ("all_reduce", "reduce_scatter", "reduce"))
        found[f"{backend}: gathered / base"] = sent["all_gather"]["bytes"] / base
        found[f"{backend}: added up / adapter"] = added / adapter
    return found


def show(result: dict[str, Any]) -> None:
    """The table."""
    lines = [("", "base, bytes", "adapter, bytes", "gathered / base", "added up / adapter")]
    told = rates(result)
    for backend in BACKENDS:
        base, adapter = (f"{result[backend][key]:,}" for key in ("base_bytes", "adapter_bytes"))
        gathered, added = (f"{told[f'{backend}: {what}']:.3f}" for what in ("gathered / base", "added up / adapter"))
        lines.append((backend, base, adapter, gathered, added))
    table(lines)


if __name__ == "__main__":
    program("gathers", measure, show, rank)
