"""Two checkouts of lorakit beside each other: did a change that should change nothing cost time or memory?

    python -m benchmarks.checkouts --before DIR [--shape 100M] [--pairs 7] [--keep]

DIR holds the earlier commit (`git worktree add DIR COMMIT`). The sides of `benchmarks.step` and `benchmarks.startup`
take turns, `before` and `after` in the same round, so that a ratio between them is free of the machine's moods.
"""

import subprocess
from pathlib import Path
from typing import Any

from benchmarks import startup, step
from benchmarks.machine import program, table
from benchmarks.turns import BEFORE, ratio


def as_lorakit(result: dict[str, Any], side: str) -> dict[str, Any]:
    """The result with ``side`` in lorakit's place, for a program's ``rates``."""
    ready = result.get("ready", {})  # a command that is started anew in each round says nothing before it
    return {**result, "lorakit": result[side], "ready": {**ready, "lorakit": ready.get(side)}}


def measure(before: str, shape: str, pairs: int) -> dict[str, Any]:
    """Rows C1, C2, C4 and C5 of both checkouts, and the medians of their ratios."""
    other = Path(before).resolve()
    done = subprocess.run(["git", "-C", before, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    programs = {
        "even": (step, step.measure(shape, "even", pairs, other)),
        "half": (step, step.measure(shape, "half", pairs, other)),
        "startup": (startup, startup.measure(pairs, other)),
    }
    return {
        "before_commit": done.stdout.strip(), "shape": shape,
        "rates": {
            name: {
                "before": module.rates(as_lorakit(found, BEFORE)), "after": module.rates(found),
                "after / before, seconds": ratio(found["lorakit"], found[BEFORE]),
            }
            for name, (module, found) in programs.items()
        },
        **{name: found for name, (_, found) in programs.items()},
    }  # fmt: skip


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
