"""Runs inside the tests' own process."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lorakit.errors import TemporaryFailure
from lorakit.recipe import load_recipe
from lorakit.run.report import Report


def train(path: Path, *overrides: str, fresh: bool = False) -> tuple[Path, str]:
    from lorakit.training.loop import run

    said: list[str] = []
    out = run(load_recipe(path, overrides), fresh=fresh, say=said.append)
    return out, "\n".join(said)


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
