"""Read the output folder of a run, also of one under way: its record, its steps, its end, the step of its patch."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, final

from lorakit.errors import RunError
from lorakit.files.atomic import fast_digest
from lorakit.files.base_files import read_json
from lorakit.patch.adapter_config import CONFIG_FILE
from lorakit.run.metrics import read_metrics
from lorakit.run.record import RECORD, is_locked, recorded_run

METRICS: Final = "metrics.jsonl"


@contextmanager
def refusing_foreign_values() -> Iterator[None]:
    """Raise RunError, around a function that reads runs, where their files have values that no run writes."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError) as problem:
        raise RunError(f"{RECORD} or {METRICS} has a value that no run writes: {problem!r}") from problem


@dataclass(frozen=True)
class RunFacts:
    """The facts of one run, as far as it has come."""

    folder: Path
    record: Mapping[str, Any]  # run.json
    lines: Sequence[Mapping[str, Any]]  # metrics.jsonl
    is_running: bool  # True if a process holds the folder's lock

    @property
    def has_ended(self) -> bool:
        """True if it wrote its patch: after all its steps, or before because of its evaluations or a callback."""
        return self.record.get("status") in ("finished", "stopped")

    @property
    def state(self) -> str:
        if self.is_running:
            return "running"
        if not self.has_ended:
            return "interrupted"
        return "stopped early" if self.record.get("stopped_early") else "finished"

    @property
    def patch_step(self) -> int | None:
        """The step of the patch in the folder; None of an unfinished run, whose patches are in its checkpoints."""
        if not self.has_ended:
            return None
        selects_best = self.section("recipe")["train"]["select"] == "best"
        return (selects_best and self.record.get("best_step")) or self.record.get("steps") or None

    def patch_of(self, name: str) -> Path | None:
        """Return the folder of the patch of the step `best` or `last`; None if there is none."""
        step = self.record.get({"best": "best_step", "last": "steps"}[name])
        folder = self.folder if step == self.patch_step else self.folder / name
        return folder if step and self.patch_step and (folder / CONFIG_FILE).exists() else None

    @cached_property
    def damage(self) -> str:
        """Say that the metrics of an ended run lack steps, or are others, because of later damage; else empty."""
        steps = self.record.get("steps")
        lacking = steps - len({line["step"] for line in self.lines if "loss" in line}) if isinstance(steps, int) else 0
        path, written = self.folder / METRICS, self.record.get("metrics")
        changed = written is not None and not (path.is_file() and fast_digest(path) == written)
        what = f"lacks {lacking} of {steps} steps" if lacking > 0 else "is not what the run wrote" if changed else ""
        return f"{METRICS} {what}" if self.has_ended and what else ""

    def curve(self, key: str) -> list[tuple[int, float]]:
        """Return (step, value) of every line of the metrics that has this key as a finite number."""
        points = [(line["step"], line.get(key)) for line in self.lines]
        return [(step, float(value)) for step, value in points if value is not None and math.isfinite(value)]

    @property
    def peak_memory_bytes(self) -> int | None:
        """Of the process that took most; None of a run that has not ended."""
        ranks = [rank for rank in (self.record.get("engine"), *self.record.get("ranks", [])) if rank is not None]
        return max((rank["peak_memory_bytes"] for rank in ranks if "peak_memory_bytes" in rank), default=None)

    def section(self, name: str) -> Mapping[str, Any]:
        return self.record.get(name) or {}


def read_run(folder: str | Path) -> RunFacts:
    """Return the facts of the run in an output folder. Raises RunError: no run is there, or its record is damaged."""
    folder = Path(folder)
    if not (folder / RECORD).is_file():
        if not folder.is_dir():
            raise RunError(f"{folder}: no such folder; looked for {folder.absolute()}")
        inside = sorted(str(path.parent) for path in folder.glob(f"*/{RECORD}"))
        more = f". There are runs inside: {', '.join(inside[:5])}" if inside else ""
        raise RunError(f"{folder}: holds no {RECORD}, so no run here has begun its first step{more}")
    record = read_json(folder / RECORD)
    if not isinstance(record.get("recipe"), dict):
        raise RunError(f"{folder / RECORD}: holds no recipe, so it is not the record of a run")
    return RunFacts(folder, record, read_metrics(folder / METRICS), is_locked(folder))


@final
@dataclass(frozen=True, repr=False)
class TrainResult:
    """The end of a run, in its output folder `folder`."""

    folder: Path
    status: str  # `finished`, or `stopped` by a callback; `elsewhere` if the output folder is on another machine
    steps: int
    total_steps: int
    losses: tuple[float, ...]  # of every step, also of those before an interruption
    evaluations: tuple[Mapping[str, float], ...]  # lines of metrics.jsonl with a held-out loss: `step`, `eval_loss` ...
    patch: Path | None  # the output folder; None before the first patch
    best: Path | None  # folder of the patch of the best step, as `last` of the last one; None if there is none
    last: Path | None
    checkpoint: Path | None  # the newest
    stopped: str | None  # reason for fewer steps than the recipe says; None if it took all

    def __repr__(self) -> str:
        loss = f", loss {self.losses[-1]:.4f}" if self.losses else ""
        eval_loss = f", held-out loss {self.evaluations[-1]['eval_loss']:.4f}" if self.evaluations else ""
        steps = f"{self.steps} of {self.total_steps} steps"
        return f"TrainResult({str(self.folder)!r}: {self.status}, {steps}{loss}{eval_loss})"


def read_result(folder: Path) -> TrainResult:
    run = RunFacts(folder, recorded_run(folder), read_metrics(folder / METRICS), is_locked(folder))
    checkpoints = sorted(folder.glob("checkpoints/step-*"))
    return TrainResult(
        folder=folder,
        status=run.record.get("status", "elsewhere"),
        steps=int(run.record.get("steps", 0)),
        total_steps=int(run.record.get("total_steps") or 0),
        losses=tuple(line["loss"] for line in run.lines if "loss" in line),
        evaluations=tuple(line for line in run.lines if "eval_loss" in line),
        patch=folder if (folder / CONFIG_FILE).exists() else None,
        best=run.patch_of("best"),
        last=run.patch_of("last"),
        checkpoint=checkpoints[-1] if checkpoints else None,
        stopped=run.record.get("stopped_early"),
    )
