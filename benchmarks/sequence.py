"""What a process saves for backward where two share the tokens of one long row (P1): counted, not timed.

    python -m benchmarks.sequence [--keep]

One row of 8,192 tokens, all of them labels. Counted are the bytes that forward saves for backward, in the process that
has the most; they count only where the processes' loss is that of one process.
"""

from pathlib import Path
from typing import Any

import torch

from benchmarks.collectives import count_collectives
from benchmarks.machine import program, run_ranks, scratch, table
from benchmarks.models import SHAPES, make_base
from benchmarks.ranks import prepared, saved_for_backward
from benchmarks.rows import packed, random_rows

SHAPE, NUM_TOKENS = "tiny", (64, 8192)
"""of the row of each step"""
NUM_LAYERS = SHAPES[SHAPE]["num_hidden_layers"]
LAYOUTS = {"one process": 1, "sequence 2": 2}
AGREES = 1e-6


def rank(processes: str, base: str) -> None:
    """One of the processes: two steps; the first process prints what they save and send in the second."""
    with prepared(Path(base), backend="ddp", processes=int(processes), sequence=int(processes)) as ready:
        losses = []
        for step, length in enumerate(NUM_TOKENS):
            with saved_for_backward() as saved, count_collectives() as counted:
                row = random_rows(SHAPES[SHAPE]["vocab_size"], [length], step)
                losses.append(ready.engine.step(step, [packed(row)]).loss)
        sent = counted.by_axis(ready.engine.mesh).get("sequence", {})
        ready.report(losses=losses, saved_bytes=ready.largest(saved[0]), sent=sent)


def measure() -> dict[str, Any]:
    """Each layout once."""
    base = make_base(scratch(), SHAPE, torch.float32)
    measured: dict[str, Any] = {"shape": SHAPE, "tokens": NUM_TOKENS[-1]}
    for name, processes in LAYOUTS.items():
        measured[name] = run_ranks("benchmarks.sequence", processes, str(processes), str(base))
    return measured


def rates(result: dict[str, Any]) -> dict[str, float]:
    """The figures that the target speaks of, of the layouts whose losses are those of one process."""
    alone, *others = LAYOUTS
    figures = {}
    for name in others:
        pairs = zip(result[name]["losses"], result[alone]["losses"], strict=True)
        if all(abs(loss / expected - 1) < AGREES for loss, expected in pairs):
            share = result[name]["saved_bytes"] / result[alone]["saved_bytes"]
            messages = result[name]["sent"]["all_to_all"]["calls"] / NUM_LAYERS
            figures[f"{name}: activations / one process"] = share
            figures[f"{name}: messages of a layer"] = messages
    return figures


def show(result: dict[str, Any]) -> None:
    """The table."""
    figures = rates(result)
    rated = ("activations / one process", "messages of a layer")
    lines: list[tuple[str, ...]] = [("", "loss", "activations, MB", *rated)]
    for name in LAYOUTS:
        values = [figures.get(f"{name}: {what}") for what in rated]
        one = result[name]
        measured = (f"{one['losses'][-1]:.6f}", f"{one['saved_bytes'] / 1e6:,.1f}")
        lines.append((name, *measured, *("" if value is None else f"{value:.3f}" for value in values)))
    table(lines)
    print(f"{result['tokens']:,} tokens in one row, shape {result['shape']}, float32")


if __name__ == "__main__":
    program("sequence", measure, show, rank)
