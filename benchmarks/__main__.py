"""All rows of a CPU machine in one go: `make bench`, or `python -m benchmarks [--only NAME ...] [--compare FILE]`.

Every figure is a ratio to something measured in the same run; the targets are those the project set itself. The result
is kept as benchmarks/results/all-HARDWARE.json, and one of the same hardware can be compared with.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import gathers, merge, save, startup, step
from benchmarks.machine import facts, keep, table


@dataclass(frozen=True)
class Target:
    """A row: which figure of which program, and where it should be."""

    row: str
    program: str
    figure: str
    at_most: float | None = None
    at_least: float | None = None

    def met(self, value: float) -> bool:
        return (self.at_most is None or value <= self.at_most) and (self.at_least is None or value >= self.at_least)

    def words(self) -> str:
        return f"<= {self.at_most:g}" if self.at_most is not None else f">= {self.at_least:g}"


PROGRAMS: Mapping[str, tuple[Callable[[], dict[str, Any]], Any]] = {
    "even": (lambda: step.measure("100M", "even", 5), step),
    "half": (lambda: step.measure("100M", "half", 5), step),
    "chat": (lambda: step.measure("100M", "chat", 5), step),
    "startup": (lambda: startup.measure(5), startup),
    "merge": (lambda: merge.measure("1.1B", 5, torch.bfloat16, 16, True), merge),
    "save": (lambda: save.measure(5), save),
    "gathers": (gathers.measure, gathers),
}
TARGETS = (
    Target("C1", "even", "lorakit / floor", at_most=1.06),
    Target("C2", "half", "tokens per second / peft", at_least=1.25),
    Target("C3", "chat", "tokens per second / peft", at_least=1.8),
    Target("C3", "chat", "tokens per second / rows of one length", at_least=0.95),
    Target("C4", "even", "memory / peft", at_most=0.5),
    Target("C5", "startup", "start to first step / peft", at_most=0.7),
    Target("C6", "merge", "merge / (cp + fsync)", at_most=1.3),
    Target("C6", "merge", "merge memory / allowed", at_most=1.0),
    Target("C11", "save", "patch save, of disk speed", at_least=0.7),
    Target("C12", "gathers", "zero3: gathered / base", at_most=2.1),
    Target("C12", "gathers", "fsdp2: gathered / base", at_most=2.1),
    Target("C12", "gathers", "zero3: added up / adapter", at_most=1.05),
    Target("C12", "gathers", "fsdp2: added up / adapter", at_most=1.05),
)


def run(names: list[str]) -> dict[str, Any]:
    """The programs, one after the other: every raw figure, and the rates that targets speak of."""
    found: dict[str, Any] = {"rates": {}, "raw": {}}
    for name in names:
        measure, program = PROGRAMS[name]
        print(f"\n== {name}: {program.__name__}", flush=True)
        result = measure()
        program.show(result)
        found["raw"][name], found["rates"][name] = result, program.rates(result)
    return found


def summary(found: dict[str, Any], before: dict[str, Any] | None) -> None:
    """Every target, what was measured, and what an earlier result had."""
    lines = [("", "figure", "target", "measured", "met", *(["before"] if before else []))]
    for target in TARGETS:
        value = found["rates"].get(target.program, {}).get(target.figure)
        if value is None:
            continue
        earlier = [f"{before['rates'].get(target.program, {}).get(target.figure, float('nan')):.3f}"] if before else []
        met = "yes" if target.met(value) else "NO"
        lines.append((target.row, target.figure, target.words(), f"{value:.3f}", met, *earlier))
    print()
    table(lines)


def earlier(path: Path | None) -> dict[str, Any] | None:
    """A kept result to compare with, of this hardware."""
    if path is None:
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    if found["hardware"] != facts()["hardware"]:
        raise SystemExit(f"{path} was measured on {found['hardware']}, this is {facts()['hardware']}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("--only", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--compare", type=Path, help="an earlier result of the same hardware")
    options = parser.parse_args()
    before = earlier(options.compare)
    print(facts()["hardware"])
    everything = run(options.only)
    summary(everything, before)
    if options.only == list(PROGRAMS):
        keep("all", everything)
