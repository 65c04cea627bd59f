"""The picture of the loss."""

import json
import math
import warnings
from pathlib import Path

import pytest

from lorakit.run.charts import draw_loss, running_mean


def test_the_running_mean_of_a_falling_loss_does_not_lag() -> None:
    losses = [4 * math.exp(-step / 30) for step in range(320)]  # a straight line on the picture's axis
    means = running_mean(losses)
    assert len(means) == 320
    assert all(math.isclose(mean, loss) for mean, loss in list(zip(means, losses, strict=True))[5:-5])


def test_the_running_mean_is_smoother_than_the_loss_and_of_short_runs_too() -> None:
    noisy = [2.0, 0.5] * 50
    assert all(0.8 < mean < 1.25 for mean in running_mean(noisy)[5:-5])
    assert math.isclose(running_mean([3.0])[0], 3.0)
    assert running_mean([]) == []


@pytest.mark.parametrize("losses", [[], [10.0], [1e-9], [0.0], [10.0, 10.0]], ids=str)
def test_a_run_of_one_step_or_none_is_drawn_without_a_warning(losses: list[float], tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, 1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png", "run")
    assert (tmp_path / "loss.png").stat().st_size > 0
