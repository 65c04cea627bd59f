"""Send the numbers of a run to experiment trackers: wandb, mlflow, tensorboard, trackio.

Invariant: from its first step on a tracker can neither end nor delay a run. Each tracker has a thread of its own, and
lines that it does not take are lost and counted.
"""

import os
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from lorakit.errors import RunError

START_SECONDS: Final = 120.0  # longer than wandb's own limit for opening a run, whose error says more
FINISH_SECONDS: Final = 30.0
MAX_WAITING: Final = 10_000  # lines of a tracker that is behind


def check_trackers(names: Sequence[str]) -> None:
    """Raise RunError unless each tracker can be imported."""
    problems = []
    for name in names:
        try:
            import_module(name)
        except Exception as problem:  # a broken package fails in many ways
            what = f"is installed and cannot be imported: {describe_error(problem)}. pip install -U"
            if isinstance(problem, ModuleNotFoundError) and problem.name == name:
                what = "not installed: pip install"
            problems.append(f"train.log_to: {name} {what} {TRACKERS[name]}")
    if problems:
        raise RunError("\n".join(problems))


def describe_error(problem: BaseException, limit: int = 600) -> str:
    """Return class and text of an error in one line, of at most so many characters."""
    text = " ".join(str(problem).split())
    text = text if len(text) <= limit else text[:limit] + " ..."
    return f"{type(problem).__name__}: {text}" if text else type(problem).__name__


TRACKERS: Final = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow-skinny sqlalchemy alembic",
    "trackio": "trackio",
}
"""tracker, as its module and in the recipe -> packages that pip installs for it"""


class Tracker:
    """A tracker of a run, in a thread of its own: mlflow's run belongs to the thread that started it."""

    def __init__(self, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        self.name = name
        self.num_lines = 0
        self.num_sent = 0
        self.problem: str | None = None
        self._lines: queue.Queue[tuple[dict[str, float], int] | None] = queue.Queue(MAX_WAITING)
        self._failure: Exception | None = None
        self.opened = threading.Event()  # set once the tracker has opened its run, or has failed to
        self.thread = threading.Thread(target=self._run, args=(folder, config), name=name, daemon=True)
        self.thread.start()

    def wait_until_open(self) -> None:
        """Raise RunError if the tracker does not open its run."""
        if not self.opened.wait(START_SECONDS):
            raise RunError(f"train.log_to: {self.name}: no answer in {START_SECONDS:.0f} seconds; leave it out")
        if self._failure is not None:
            raise RunError(f"train.log_to: {self.name}: {describe_error(self._failure)}") from self._failure

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.num_lines += 1
        with suppress(queue.Full):
            self._lines.put_nowait((dict(values), step))

    def end(self) -> None:
        """Let the tracker end once it has sent the lines that wait."""
        with suppress(queue.Full):  # then it ends with the process, because its thread is a daemon
            self._lines.put_nowait(None)

    def _run(self, folder: Path, config: Mapping[str, Any]) -> None:
        try:
            tracker = _open_tracker(self.name, folder, config)
        except Exception as problem:
            self._failure = problem
            return
        finally:
            self.opened.set()
        while (line := self._lines.get()) is not None:
            try:
                tracker.log(line[0], step=line[1])
                self.num_sent += 1
            except Exception as problem:  # the run goes on, and `lost_lines` says what is missing
                self.problem = self.problem or describe_error(problem, 160)
        with suppress(Exception):  # the lines are there, and nobody can be told how the tracker marked its run
            tracker.finish()


def _open_tracker(name: str, folder: Path, config: Mapping[str, Any]) -> Any:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    kind = LOGGER_TYPE_TO_CLASS[name]
    # a tracker with files makes a folder of its run's name in the output folder
    local = kind.requires_logging_directory
    # accelerate gives wandb the project's name, and wandb then reads no WANDB_PROJECT
    project = (os.environ.get("WANDB_PROJECT") if name == "wandb" else None) or folder.name or "lorakit"
    tracker = kind(name, logging_dir=str(folder)) if local else kind(project)
    tracker.start()
    settings = {key: value if isinstance(value, int | float | str) else str(value) for key, value in config.items()}
    if name == "tensorboard":  # as a text, because accelerate would make a second run of them
        tracker.tracker.add_text("recipe", "\n".join(f"    {key}: {value}" for key, value in settings.items()))
    else:
        tracker.store_init_configuration(settings)
    return tracker


class Trackers:
    """The experiment trackers of a run. Without any, accelerate is not imported."""

    def __init__(self, names: Sequence[str], folder: Path, config: Mapping[str, Any]) -> None:
        """Open a run in each. Raises RunError: one of them opens none."""
        if names:
            from accelerate import PartialState

            PartialState()  # accelerate's trackers read the rank from this singleton
        self._trackers = [Tracker(name, folder, config) for name in names]
        try:
            for tracker in self._trackers:
                tracker.wait_until_open()
        except RunError:
            self.close()
            raise

    def log(self, values: Mapping[str, float], step: int) -> None:
        for tracker in self._trackers:
            tracker.log(values, step)

    def close(self) -> None:
        """Wait for the trackers, but not long, and print how many lines each has lost."""
        for tracker in self._trackers:
            tracker.end()
        end = time.monotonic() + FINISH_SECONDS
        for tracker in self._trackers:
            if tracker.opened.is_set():  # one that has not even opened its run has no line to send
                tracker.thread.join(max(0.0, end - time.monotonic()))
        for name, lost in self.lost_lines().items():
            text = f"{name} has lost {lost['lines']} of {lost['of']} lines ({lost['why']}); metrics.jsonl has them all"
            print(text, file=sys.stderr)

    def lost_lines(self) -> dict[str, Any]:
        """Return by tracker the number of lines that it did not take, of how many, and why; none of complete ones."""
        return {
            tracker.name: {"lines": lost, "of": tracker.num_lines, "why": tracker.problem or "it did not answer"}
            for tracker in self._trackers
            if (lost := tracker.num_lines - tracker.num_sent)
        }
