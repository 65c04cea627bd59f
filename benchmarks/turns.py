"""Sides that do the same work in processes of their own and take turns, so that a noisy machine is noisy for all."""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.machine import peak_bytes, python

Step = Callable[[], dict[str, Any]]
"""One round of a side's work -> what it took and what came of it."""
BEFORE = "lorakit before"
"""the side of another checkout"""


def serve(step: Step, **ready: Any) -> None:
    """One side: a round for every line on standard input, an answer per line on standard output."""
    print(json.dumps(ready), flush=True)
    for _ in sys.stdin:
        print(json.dumps({**step(), "peak_bytes": peak_bytes()}), flush=True)


class Side:
    """A module's ``side(*arguments)``, which ends in ``serve``; ``ready`` is what it said before its first round.

    ``checkout``: the folder whose modules it imports; the current one when none is given.
    """

    def __init__(self, module: str, *arguments: str, checkout: Path | None = None) -> None:
        call = f"import sys; from {module} import side; side(*sys.argv[1:])"
        self._module, pipe = module, subprocess.PIPE
        self._process = subprocess.Popen(
            python("-c", call, *arguments), stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=checkout
        )
        self.ready = self._answer()

    def step(self) -> dict[str, Any]:
        assert self._process.stdin
        print(file=self._process.stdin, flush=True)
        return self._answer()

    def end(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        assert self._process.stderr
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._module}\n{self._process.stderr.read()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def take_turns(sides: Mapping[str, Step], rounds: int, *, warm: int = 1) -> dict[str, list[dict[str, Any]]]:
    """``rounds`` rounds of every side, one after the other, the order turning round; first ``warm`` uncounted."""
    names = list(sides)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(-warm, rounds):
        for name in names if number % 2 else reversed(names):
            answer = sides[name]()
            if number >= 0:
                found[name].append(answer)
    return found


def answers_of(sides: Mapping[str, Side], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """What sides answer in turn, after which their processes end."""
    answers = take_turns({name: one.step for name, one in sides.items()}, rounds)
    for one in sides.values():
        one.end()
    return answers


def middle(rounds: list[dict[str, Any]], what: str = "seconds") -> float:
    """The median."""
    return float(statistics.median(one[what] for one in rounds))


def ratio(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], what: str = "seconds") -> float:
    """The median of the ratios, pair by pair."""
    return float(statistics.median(a[what] / b[what] for a, b in zip(ours, theirs, strict=True)))
