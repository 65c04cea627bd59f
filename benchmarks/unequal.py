"""One conversation of 8,000 tokens beside 15 of 200: the memory of their keys and values, and the speed of all (S8).

    python -m benchmarks.unequal [--shape 100M] [--pairs 3] [--keep]

Beside 16 of 200 on the same engine, one after the other. The time counts from when every row has its first token until
the first one has its last.
"""

import random
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch

from benchmarks.machine import program, scratch, table
from benchmarks.models import make_base
from benchmarks.turns import middle, ratio

LONG, SHORT, ROWS, NEW_TOKENS = 8000, 200, 16, 48
UNEQUAL = "8,000 tokens beside 15 of 200"
SIDES = {"unequal": (LONG, *[SHORT] * (ROWS - 1)), "equal": (SHORT,) * ROWS}


def measure(shape: str, pairs: int) -> dict[str, Any]:
    """Each pair: seconds of a token of every row, and bytes of keys and values by those of the tokens alone."""
    import lorakit
    from lorakit.serving.engine import ServingEngine

    model = lorakit.load(make_base(scratch(), shape, torch.float32), dtype="float32")
    found: dict[str, Any] = {"shape": shape, "dtype": "float32", **{side: [] for side in SIDES}}
    for _ in range(pairs):
        for side, lengths in SIDES.items():
            with closing(ServingEngine(model, max_rows=ROWS, kv_memory_bytes=8 << 30)) as engine:
                found[side].append(decode(engine, lengths))
    return found


def decode(engine: Any, lengths: Sequence[int]) -> dict[str, float]:
    """Answers to prompts of these lengths, the first of which is computed first."""
    from lorakit.decoding.sampling import SamplingSettings

    chooser = random.Random(0)
    times: list[list[float]] = [[] for _ in lengths]
    most = 0

    def deliver(row: int, item: Any) -> None:
        nonlocal most
        if item is not None:
            times[row].append(time.perf_counter())
            most = max(most, engine.counts()["kv_bytes"])

    generations = [
        engine.submit(
            [chooser.randrange(5, 3000) for _ in range(length)],
            None,
            SamplingSettings(max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS),
            lambda item, row=row: deliver(row, item),
        )
        for row, length in enumerate(lengths)
    ]
    while any(generation.reason is None for generation in generations):
        time.sleep(0.01)
    began = max(row[0] for row in times)
    ended = min(row[-1] for row in times)
    tokens = sum(began < moment <= ended for row in times for moment in row)
    needed = (sum(lengths) + len(lengths) * NEW_TOKENS) * engine._memory.position_bytes
    return {"seconds": (ended - began) / tokens, "memory": most / needed, "tokens": tokens}


def rates(result: dict[str, Any]) -> dict[str, float]:
    """The figures that the targets speak of."""
    return {
        f"{UNEQUAL}: memory / their sum": middle(result["unequal"], "memory"),
        f"{UNEQUAL}: tokens per second / 16 of 200": 1 / ratio(result["unequal"], result["equal"]),
    }


def show(result: dict[str, Any]) -> None:
    """The table: medians of the pairs."""
    lines: list[tuple[str, ...]] = [(f"{result['shape']}, float32", "tokens/s", "memory / the sum of all tokens'")]
    for side in SIDES:
        lines.append((side, f"{1 / middle(result[side]):.1f}", f"{middle(result[side], 'memory'):.2f}"))
    table(lines)
    for name, rate in rates(result).items():
        print(f"{name:<64} {rate:.3f}")


if __name__ == "__main__":
    program("unequal-{shape}", measure, show, shape="100M", pairs=3)
