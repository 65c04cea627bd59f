"""The result of a run, read from the files of its output folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from lorakit.patch.adapter_config import CONFIG_FILE
from lorakit.run.metrics import read_metrics
from lorakit.run.record import recorded_run


@final
@dataclass(frozen=True, repr=False)
class TrainResult:
    """What a run ended with.

    folder: the output folder. status: `finished`, or `stopped` by a callback; `elsewhere` if the output folder is on
    another machine. losses: of every step, also of those before an interruption. evaluations: the lines of
    metrics.jsonl with a held-out loss: `step`, `eval_loss` and other measures. patch: the output folder; None before
    the first patch. best, last: folders of the patches of these steps; None if there is none. checkpoint: the newest.
    stopped: why the run took fewer steps than its recipe says; None if it took all.
    """

    folder: Path
    status: str
    steps: int
    total_steps: int
    losses: tuple[float, ...]
    evaluations: tuple[Mapping[str, float], ...]
    patch: Path | None
    best: Path | None
    last: Path | None
    checkpoint: Path | None
    stopped: str | None

    def __repr__(self) -> str:
        loss = f", loss {self.losses[-1]:.4f}" if self.losses else ""
        eval_loss = f", held-out loss {self.evaluations[-1]['eval_loss']:.4f}" if self.evaluations else ""
        steps = f"{self.steps} of {self.total_steps} steps"
        return f"TrainResult({str(self.folder)!r}: {self.status}, {steps}{loss}{eval_loss})"


def read_result(folder: Path) -> TrainResult:
    """Return the result of the run in an output folder."""
    run = recorded_run(folder)
    lines = read_metrics(folder / "metrics.jsonl")
    steps = int(run.get("steps", 0))
    has_patch = (folder / CONFIG_FILE).exists()
    step_of_patch = {"best": run.get("best_step"), "last": steps or None}
    chosen = run.get("recipe", {}).get("train", {}).get("select", "last")

    def patch_of(name: str) -> Path | None:
        if not has_patch or step_of_patch[name] is None:
            return None
        is_chosen = name == chosen or step_of_patch["best"] in (None, steps)
        path = folder if is_chosen else folder / name
        return path if (path / CONFIG_FILE).exists() else None

    checkpoints = sorted(folder.glob("checkpoints/step-*"))
    return TrainResult(
        folder=folder,
        status=run.get("status", "elsewhere"),
        steps=steps,
        total_steps=int(run.get("total_steps", 0)),
        losses=tuple(line["loss"] for line in lines if "loss" in line),
        evaluations=tuple(line for line in lines if "eval_loss" in line),
        patch=folder if has_patch else None,
        best=patch_of("best"),
        last=patch_of("last"),
        checkpoint=checkpoints[-1] if checkpoints else None,
        stopped=run.get("stopped_early"),
    )
