"""The picture of the loss."""

import math

from lorakit.run.metrics import running_mean


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
