"""Two checkouts of lorakit beside each other: did a change that should change nothing cost time or memory?

    python -m benchmarks.checkouts --before DIR [--shape 100M] [--pairs 7] [--keep]

DIR holds the earlier commit (`git worktree add DIR COMMIT`). The sides of `benchmarks.step` and `benchmarks.startup`
take turns, `before` and `after` in the same round, so that a ratio between them is free of the machine's moods.
"""

import subprocess
from pathlib import Path
from typing import Any

import torch

from benchmarks import startup, step
from benchmarks.machine import copy_rate, matmul_rate, program, scratch, table
from benchmarks.models import flops, make_base, make_patch
from benchmarks.sides import RANK
from benchmarks.turns import Side, ratio, take_turns
from lorakit.base.load import load_skeleton

WORKS = {"even": ("C1", "C4"), "half": ("C2",)}


def steps(before: Path, shape: str, rows: str, pairs: int) -> dict[str, Any]:
    """Steps of the floor, of both checkouts and of PEFT, in turn."""
    base = make_base(scratch(), shape, torch.float32)
    patch = make_patch(scratch(), base, rank=RANK, seed=0)
    names = {"floor": None, "lorakit before": before, "lorakit": None, "peft": None, "peft defaults": None}
    sides = {
        name: Side("benchmarks.step", name, str(base), str(patch), rows, checkout=checkout)
        for name, checkout in names.items()
    }
    rounds = take_turns({name: one.step for name, one in sides.items()}, pairs)
    for one in sides.values():
        one.end()
    skeleton: Any = load_skeleton(base)
    share = 1.0 if rows == "even" else 0.5
    return {
        "sides": list(names), "ready": {name: one.ready for name, one in sides.items()}, **rounds,
        "flops_of_a_token": flops(skeleton, step.lengths_of(rows, 0), RANK, share),
        "matmul_flops": matmul_rate(skeleton.config.to_dict(), 1024), "copy_bytes_per_second": copy_rate(),
    }  # fmt: skip


def rates_of(result: dict[str, Any], side: str) -> dict[str, float]:
    """The figures of targets, with ``side`` as lorakit."""
    ready = {**result["ready"], "lorakit": result["ready"][side]}
    return step.rates({**result, "lorakit": result[side], "ready": ready})


def starts(before: Path, pairs: int) -> dict[str, Any]:
    """Seconds to the first step of both checkouts and of PEFT's script, in turn."""
    base, rows = make_base(scratch(), "tiny", torch.float32), startup.rows_file()
    return take_turns({
        "lorakit before": lambda: startup.lorakit_side(base, rows, before),
        "lorakit": lambda: startup.lorakit_side(base, rows),
        "peft": lambda: startup.trainer_side(base, rows),
    }, pairs)  # fmt: skip


def measure(before: str, shape: str, pairs: int) -> dict[str, Any]:
    """Rows C1, C2, C4 and C5 of both checkouts, and the medians of their ratios."""
    other = Path(before).resolve()
    done = subprocess.run(["git", "-C", before, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    result: dict[str, Any] = {"before_commit": done.stdout.strip(), "shape": shape, "rates": {}}
    for work in WORKS:
        found = result[work] = steps(other, shape, work, pairs)
        result["rates"][work] = {
            "before": rates_of(found, "lorakit before"), "after": rates_of(found, "lorakit"),
            "after / before, seconds": ratio(found["lorakit"], found["lorakit before"]),
        }  # fmt: skip
    found = result["startup"] = starts(other, pairs)
    result["rates"]["startup"] = {
        "before": {"start to first step / peft": ratio(found["lorakit before"], found["peft"])},
        "after": {"start to first step / peft": ratio(found["lorakit"], found["peft"])},
        "after / before, seconds": ratio(found["lorakit"], found["lorakit before"]),
    }
    return result


def show(result: dict[str, Any]) -> None:
    """A table of every figure before and after."""
    lines: list[tuple[str, ...]] = [("", "", result["before_commit"], "here")]
    for work, rates in result["rates"].items():
        for name, earlier in rates["before"].items():
            lines.append((work, name, f"{earlier:.3f}", f"{rates['after'][name]:.3f}"))
        lines.append((work, "seconds here / before", "", f"{rates['after / before, seconds']:.3f}"))
    table(lines)


if __name__ == "__main__":
    program("checkouts", measure, show, before="", shape="100M", pairs=7)
