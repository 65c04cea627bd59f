"""What a process holds and sends where two share every weight (P3): counted, not timed.

    python -m benchmarks.tensor [--keep]

Half of the base in each; the messages of the base's own cut, and those of the adapter. The peak of a process is that of
loading and two steps of 128 tokens, beside one process that has all of the base. Activations are the bytes that forward
saves for backward.
"""

from pathlib import Path
from typing import Any

import torch

from benchmarks.collectives import count_collectives
from benchmarks.machine import peak_bytes, program, run_ranks, scratch, table
from benchmarks.models import SHAPES, make_base
from benchmarks.ranks import prepared, saved_for_backward
from benchmarks.rows import packed, random_rows

SHAPE = "100M"
NUM_LAYERS = SHAPES[SHAPE]["num_hidden_layers"]
BASES_SUMS = (1 + 2 * NUM_LAYERS + 2) + (2 * NUM_LAYERS - 1 + 1)
"""forward: embedding, two of each layer, two of the loss; backward: two of each layer but the first one's attention,
whose input has no gradient, and one of the loss"""
LAYOUTS = {"ddp x 1": ("ddp", 1, 1), "ddp, tensor 2": ("ddp", 2, 2), "fsdp2, data 2 x tensor 2": ("fsdp2", 4, 2)}


def rank(backend: str, processes: str, tensor: str, base: str) -> None:
    """One of the processes: two steps; the first process prints what it holds and sends."""
    with prepared(Path(base), backend=backend, processes=int(processes), tensor=int(tensor)) as ready:
        for step in range(2):
            with saved_for_backward() as saved, count_collectives() as sent:
                ready.engine.step(step, [packed(random_rows(SHAPES[SHAPE]["vocab_size"], [64, 64], step))])
        layout = ready.engine.layout()
        ready.report(
            base_bytes=layout["base_bytes"],
            sent=sent.by_axis(ready.engine.mesh).get("tensor", {}),
            peak_bytes=peak_bytes() - ready.process_bytes,
            saved_bytes=saved[0],
        )


def measure() -> dict[str, Any]:
    """Each layout once."""
    base = make_base(scratch(), SHAPE, torch.float32)
    measured: dict[str, Any] = {"shape": SHAPE}
    for name, (backend, processes, tensor) in LAYOUTS.items():
        arguments = (backend, str(processes), str(tensor), str(base))
        measured[name] = run_ranks("benchmarks.tensor", processes, *arguments)
    return measured


def rates(result: dict[str, Any]) -> dict[str, float]:
    """The figures that the target speaks of."""
    alone, *others = LAYOUTS
    figures = {}
    for name in others:
        messages = sum(count["calls"] for count in result[name]["sent"].values())
        figures[f"{name}: base / one process"] = result[name]["base_bytes"] / result[alone]["base_bytes"]
        figures[f"{name}: messages beyond the base's own"] = messages - BASES_SUMS
        figures[f"{name}: activations / one process"] = result[name]["saved_bytes"] / result[alone]["saved_bytes"]
        # a sum that all get is a reduce-scatter and an all-gather
        figures[f"{name}: MB sent"] = (
            sum(count["bytes"] * (2 if kind == "all_reduce" else 1) for kind, count in result[name]["sent"].items())
            / 2e6
        )
    return figures


def show(result: dict[str, Any]) -> None:
    """The table."""
    columns = {"base, MB": "base_bytes", "peak above imports, MB": "peak_bytes", "activations, MB": "saved_bytes"}
    rated = ("base / one process", "activations / one process", "messages beyond the base's own", "MB sent")
    figures = rates(result)
    lines = [("", *columns, *rated)]
    for name in LAYOUTS:
        values = [f"{result[name][key] / 1e6:,.1f}" for key in columns.values()]
        shares = [figures.get(f"{name}: {what}") for what in rated]
        lines.append((name, *values, *("" if share is None else f"{share:,.3f}" for share in shares)))
    table(lines)


if __name__ == "__main__":
    program("tensor", measure, show, rank)
