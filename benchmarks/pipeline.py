"""What the two stages of a pipeline hold and send, and the share of a step in which they idle (P2): counted, not timed.

python -m benchmarks.pipeline [--keep]
"""

from pathlib import Path
from typing import Any

import torch

from benchmarks.collectives import count_collectives
from benchmarks.machine import program, run_ranks, scratch, table
from benchmarks.models import SHAPES, make_base
from benchmarks.ranks import prepared
from benchmarks.rows import packed, random_rows

SHAPE = "1.1B"
STAGES, MICRO_BATCHES, NUM_TOKENS = 2, 6, 16


def rank(base: str) -> None:
    """One of two stages: two steps; the first process prints what each has of the base."""
    with prepared(Path(base), torch.bfloat16, backend="ddp", processes=STAGES, pipeline=STAGES) as ready:
        rows = random_rows(SHAPES[SHAPE]["vocab_size"], [NUM_TOKENS] * MICRO_BATCHES, 0)
        for step in range(2):
            with count_collectives() as counted:
                ready.engine.step(step, [packed([row]) for row in rows])
        layout = {**ready.engine.layout(), "sent": counted.by_axis(ready.engine.mesh)["pipeline"]}
        ready.report(base_bytes=ready.base_bytes, layouts=ready.engine.group.all_gather(layout))


def idle_share(num_stages: int, num_micro_batches: int) -> float:
    """The share of a step in which a stage idles, by playing the stages' orders: a backward takes two forwards."""
    from lorakit.parallel.pipeline.stage import FORWARD, one_forward_one_backward

    orders = [list(one_forward_one_backward(stage, num_stages, num_micro_batches)) for stage in range(num_stages)]
    ends: dict[tuple[int, str, int], float] = {}
    free, following = [0.0] * num_stages, [0] * num_stages
    while any(next_one < len(order) for next_one, order in zip(following, orders, strict=True)):
        for stage, order in enumerate(orders):
            direction, number = order[min(following[stage], len(order) - 1)]
            source = stage - 1 if direction == FORWARD else stage + 1
            waits = 0 <= source < num_stages and (source, direction, number) not in ends
            if waits or following[stage] == len(order):
                continue
            begin = max(free[stage], ends.get((source, direction, number), 0.0))
            free[stage] = ends[stage, direction, number] = begin + (1.0 if direction == FORWARD else 2.0)
            following[stage] += 1
    return 1 - 3.0 * num_micro_batches / max(free)


def measure() -> dict[str, Any]:
    """One run of two stages."""
    base = make_base(scratch(), SHAPE, torch.bfloat16)
    return {"shape": SHAPE, **run_ranks("benchmarks.pipeline", STAGES, str(base))}


def rates(result: dict[str, Any]) -> dict[str, float]:
    """The figures that the targets speak of."""
    largest = max(layout["base_bytes"] for layout in result["layouts"])
    expected = (STAGES - 1) / (MICRO_BATCHES + STAGES - 1)
    return {
        "2 stages: base of a process / all": largest / result["base_bytes"],
        "2 stages: idle share - (p - 1) / (m + p - 1)": abs(idle_share(STAGES, MICRO_BATCHES) - expected),
    }


def show(result: dict[str, Any]) -> None:
    """The table."""
    lines = [("stage", "layers", "base, bytes", "of all", "messages of a step")]
    for layout in result["layouts"]:
        stage, sent = layout["stage"], layout["sent"]
        calls = ", ".join(f"{kind} {sent[kind]['calls']}" for kind in ("send", "receive") if kind in sent)
        share = layout["base_bytes"] / result["base_bytes"]
        layers = f"{stage['layers'][0]} to {stage['layers'][1] - 1}"
        lines.append((str(stage["number"]), layers, f"{layout['base_bytes']:,}", f"{share:.3f}", calls))
    table(lines)
    print(f"idle share of {STAGES} stages and {MICRO_BATCHES} micro-batches: {idle_share(STAGES, MICRO_BATCHES):.3f}")


if __name__ == "__main__":
    program("pipeline", measure, show, rank)
