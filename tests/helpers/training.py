"""Runs inside the tests' own process."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lorakit.errors import TemporaryFailure
from lorakit.recipe import load_recipe
from lorakit.run.display import Report
from lorakit.run.metrics import read_metrics
from tests.helpers.fork_server import ROOT, run_python


def train(path: Path, *overrides: str, fresh: bool = False) -> tuple[Path, str]:
    from lorakit.training.loop import run

    said: list[str] = []
    out = run(load_recipe(path, overrides), fresh=fresh, say=said.append)
    return out, "\n".join(said)


def train_in_two_processes(path: Path, *layout: str) -> Path:
    """Train as `lorakit train` does, with keys of the recipe's `parallel` section; return the output folder."""
    ended = run_python("-m", "lorakit.cli", "train", path, *layout, "parallel.processes=2", cwd=ROOT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return Path(load_recipe(path).output)


def losses(out: Path) -> list[float]:
    """Return the loss of each step of a run."""
    return [line["loss"] for line in read_metrics(out / "metrics.jsonl") if "loss" in line]


def train_through_stops(path: Path, monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> tuple[Path, str]:
    """Stop a run after each of the steps, and let it go on to its end."""
    stop_at(monkeypatch, steps)
    while steps:
        with pytest.raises(TemporaryFailure):
            train(path)
    return train(path)


def stop_at(monkeypatch: pytest.MonkeyPatch, steps: set[int], number: int = signal.SIGTERM) -> None:
    """Send this process a real signal as soon as one of the steps is done."""
    original = Report.step

    def step(self: Report, step: int, report: Any, seconds: float) -> None:
        original(self, step, report, seconds)
        if step in steps:
            steps.remove(step)
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Report, "step", step)
