"""The picture of the loss."""

import math
import re
import warnings
from itertools import pairwise
from pathlib import Path

import pytest

from lorakit.run.charts import Curve, draw_losses, running_mean


def test_the_running_mean_of_a_falling_loss_does_not_lag() -> None:
    losses = [(step, 4 * math.exp(-step / 30)) for step in range(320)]  # a straight line on the picture's axis
    means = running_mean(losses)
    assert [step for step, _ in means] == list(range(320))
    assert all(math.isclose(mean[1], loss[1]) for mean, loss in list(zip(means, losses, strict=True))[5:-5])


def test_the_running_mean_is_smoother_than_the_loss_and_of_short_runs_too() -> None:
    noisy = list(enumerate([2.0, 0.5] * 50))
    assert all(0.8 < mean < 1.25 for _, mean in running_mean(noisy)[5:-5])
    assert math.isclose(running_mean([(1, 3.0)])[0][1], 3.0)
    assert running_mean([]) == []
    negative = [(step, -1.0 - step / 10) for step in range(1, 40)]
    assert all(
        math.isclose(mean, value)
        for (_, mean), (_, value) in zip(running_mean(negative)[3:-3], negative[3:-3], strict=True)
    )


@pytest.mark.parametrize("losses", [[], [10.0], [1e-9], [0.0], [10.0, 10.0]], ids=str)
def test_a_run_of_one_step_or_none_is_drawn_without_a_warning(losses: list[float], tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_losses("run", list(enumerate(losses, 1)), [], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 0


def texts(losses: Curve, eval_losses: Curve, folder: Path) -> list[str]:
    """Return the texts of a picture: labels of ticks, axes and lines."""
    draw_losses("a $title", losses, eval_losses, folder / "picture.svg")
    return [text.strip() for text in re.findall(r"<text[^>]*>([^<]*)</text>", (folder / "picture.svg").read_text())]


def ticks(losses: Curve, folder: Path) -> tuple[list[str], list[str]]:
    """Return the labels of the ticks of both axes: steps, values."""
    words = texts(losses, [], folder)
    where = words.index("step")
    values = words[where + 1 :]
    return words[:where], [word for word in values if re.fullmatch(r"[-\N{MINUS SIGN}]?[\d.,e+-]+", word)]


@pytest.mark.parametrize(
    "curve", [[(1, 2.0)], [(1, 2.0), (2, 1.0)], [(step, 3.0 / step) for step in range(1, 11)], [(0, 8.35), (7, 8.05)]]
)
@pytest.mark.parametrize("scale", [1.0, 0.1, 1e-4])
def test_ticks_are_whole_steps_and_plain_decimals(curve: Curve, scale: float, tmp_path: Path) -> None:
    steps, values = ticks([(step, value * scale) for step, value in curve], tmp_path)
    assert all(step.isdecimal() for step in steps)
    assert len(values) >= 2
    assert all(re.fullmatch(r"[\d.]+", value) for value in values)
    assert all(0.4 < float(value) / (scale * min(y for _, y in curve)) < 25 for value in values)


def test_an_axis_is_linear_where_the_largest_value_is_below_three_times_the_smallest(tmp_path: Path) -> None:
    def values(high: float) -> list[float]:
        return [float(value) for value in ticks([(0, 1.0), (9, high)], tmp_path)[1]]

    linear = values(2.9)
    assert len(linear) >= 4
    assert len({round(two - one, 9) for one, two in pairwise(linear)}) == 1
    assert values(30.0)[-1] / values(30.0)[-2] > 2


def test_a_run_without_held_out_rows_has_none_in_its_legend(tmp_path: Path) -> None:
    losses = [(1, 2.0), (2, 1.0)]
    assert "held out" not in texts(losses, [], tmp_path)
    assert "held out" in texts(losses, [(2, 1.5)], tmp_path)
