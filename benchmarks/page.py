"""Writes the tables and the picture of docs/performance.md from kept results: `python -m benchmarks.page RESULT ...`.

Targets of all of them, a column for each machine; of several results of a machine the first that has a figure counts.
Sides and picture of the first result.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.__main__ import TARGETS
from benchmarks.step import over_weights
from benchmarks.targets import Target
from benchmarks.turns import middle

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
PICTURE = PAGE.parent / "performance.png"
BEGIN, END = "<!-- written by benchmarks/page.py -->", "<!-- to here -->"
WORKS = {
    "even": "4 rows of 256 tokens, all label tokens",
    "half": "the same, half of them labels",
    "chat": "8 rows of mixed lengths",
}


def targets(results: Sequence[dict[str, Any]]) -> list[str]:
    """Every target and what was measured; what misses it is bold. Rows that none of the results has are named below."""
    machines = list(dict.fromkeys(found["hardware"] for found in results))
    lines = ["| row | figure | target | " + " | ".join(machines) + " |", "|---" * (3 + len(machines)) + "|"]
    missing = []
    for target in TARGETS:
        told = [told_of(target, measured_on(machine, target, results)) for machine in machines]
        if any(told):
            lines.append(f"| {target.row} | {target.figure} | {target.words()} | {' | '.join(told)} |")
        else:
            missing.append(target.row)
    if missing:
        lines += ["", f"Not in these results: {', '.join(dict.fromkeys(missing))}."]
    return lines


def measured_on(machine: str, target: Target, results: Sequence[dict[str, Any]]) -> float | None:
    """The target's figure in the first of a machine's results that has it."""
    values = (target.of(found) for found in results if found["hardware"] == machine)
    return next((value for value in values if value is not None), None)


def told_of(target: Target, value: float | None) -> str:
    """A cell of the table."""
    return "" if value is None else f"{value:.3f}" if target.met(value) else f"**{value:.3f}**"


def header(path: Path, found: dict[str, Any]) -> str:
    """Where, when and with what a result was measured."""
    versions = found["versions"]
    return (
        f"- {found['hardware']}, {found['threads']} threads, torch {versions['torch']}, transformers"
        f" {versions['transformers']}, PEFT {versions['peft']}, {found['date']} (`benchmarks/results/{path.name}`)"
    )


def steps(found: dict[str, Any]) -> list[str]:
    """Seconds and memory of every side."""
    lines = ["| rows | side | seconds | tokens/s | MB over imports and weights |", "|---|---|---|---|---|"]
    for work, words in WORKS.items():
        if (raw := found["raw"].get(work)) is None:
            continue
        for name in raw["sides"]:
            seconds, tokens = middle(raw[name]), middle(raw[name], "tokens")
            memory = over_weights(raw, name) / 1e6
            lines.append(f"| {words} | {name} | {seconds:.2f} | {tokens / seconds:.0f} | {memory:.0f} |")
    return lines


def draw(found: dict[str, Any]) -> None:
    """Tokens per second and memory of a step, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    works = [work for work in WORKS if work in found["raw"]]
    sides = {"lorakit": "#2f6f9f", "peft": "#b8b8b8", "peft defaults": "#dddddd"}
    figure, (speed, memory) = plt.subplots(1, 2, figsize=(10, 3.6))
    for offset, (name, colour) in enumerate(sides.items()):
        places = [index + (offset - 1) * 0.27 for index in range(len(works))]
        rounds = [found["raw"][work][name] for work in works]
        speed.bar(places, [middle(r, "tokens") / middle(r) for r in rounds], 0.25, label=name, color=colour)
        memory.bar(places, [over_weights(found["raw"][work], name) / 1e6 for work in works], 0.25, color=colour)
    for axis, title in ((speed, "useful tokens per second"), (memory, "peak memory over imports and weights, MB")):
        axis.set_title(title, fontsize=10)
        axis.set_xticks(range(len(works)), [WORKS[work].replace(", ", ",\n") for work in works], fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=8, loc="lower center", ncols=len(sides))
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(PICTURE, dpi=110)


def write(paths: Sequence[Path]) -> None:
    """The part of the page between its marks."""
    results = [json.loads(path.read_text()) for path in paths]
    body = [
        BEGIN, *map(header, paths, results), "", *targets(results), "",
        f"![tokens per second and memory](performance.png)\n\nOn {results[0]['hardware']}:", "", *steps(results[0]),
    ]  # fmt: skip
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + "\n".join(body) + "\n" + END + after)
    draw(results[0])


if __name__ == "__main__":
    write([Path(name) for name in sys.argv[1:]])
