"""The life of a run, by the command alone: killed, continued, extended, the start of another, compared, reported."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from lorakit.run.metrics import read_metrics
from tests.helpers.fork_server import DEVNULL, ROOT, run_python, start_python

TENSORS = "adapter_model.safetensors"
RECIPE = {
    "base": {"model": "builtin:tiny", "dtype": "float32"},
    "adapter": {"rank": 4},
    "data": {
        "train": [{"path": str(ROOT / "data/json/train.jsonl"), "limit": 24, "name": "json"}],
        "eval": [{"path": str(ROOT / "data/json/eval.jsonl"), "limit": 6, "name": "held out"}],
        "max_tokens": 128,
    },
    "train": {
        "epochs": 2, "batch_size": 4, "learning_rate": 5e-3, "warmup_steps": 2, "schedule": "constant",
        "save_every_steps": 2, "eval_every_steps": 4,
    },
    "output": "out",
}  # fmt: skip
"""12 steps; a constant rate, so that a longer run takes the same steps"""


def lorakit(folder: Path, *arguments: object) -> str:
    """Run the command in a folder; what it printed."""
    ended = run_python("-m", "lorakit.cli", *arguments, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def losses(run: Path) -> list[tuple[int, float]]:
    lines = read_metrics(run / "metrics.jsonl")
    return [(line["step"], line[key]) for line in lines for key in ("loss", "eval_loss") if key in line]


def record(run: Path) -> Any:
    return json.loads((run / "run.json").read_text())


@pytest.mark.matrix
@pytest.mark.spread
def test_a_run_is_killed_continued_extended_started_from_compared_and_reported(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(json.dumps(RECIPE))
    out, full, warm = tmp_path / "out", tmp_path / "full", tmp_path / "warm"
    lorakit(tmp_path, "train", "mine.yaml", "output=full", "train.epochs=3")

    with start_python("-m", "lorakit.cli", "train", "mine.yaml", cwd=tmp_path, stdout=DEVNULL, stderr=DEVNULL) as run:
        until = time.monotonic() + 60
        while not (out / "checkpoints" / "step-00000004").is_dir() and time.monotonic() < until:
            time.sleep(0.005)
        run.kill()
        run.wait()
    assert record(out)["status"] == "running"
    assert 4 <= losses(out)[-1][0] < 12

    continued = lorakit(tmp_path, "train", "mine.yaml")
    assert "resuming   after step " in continued
    assert record(out)["status"] == "finished"
    assert losses(out) == [point for point in losses(full) if point[0] <= 12]

    extended = lorakit(tmp_path, "train", "mine.yaml", "train.epochs=3")
    assert "longer     18 steps instead of 12" in extended
    assert losses(out) == losses(full)
    assert (out / TENSORS).read_bytes() == (full / TENSORS).read_bytes()

    started = lorakit(tmp_path, "train", "mine.yaml", "output=warm", "train.epochs=1", "adapter.start_from=out")
    assert "start from out" in started
    assert record(warm)["results"]["eval_loss_start"] == losses(out)[-1][1]
