"""The lines before and after a run."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import lorakit

Recipe = Callable[..., Path]


@pytest.mark.matrix
def test_the_end_says_how_long_it_took_and_what_became_of_the_loss(
    recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    result = lorakit.train(recipe(train={"steps": 3, "warmup_steps": 1}))
    said = capsys.readouterr().out
    change = f"loss {result.losses[0]:.2f} -> {result.losses[-1]:.2f}"
    assert re.search(rf"^done in [\d.]+ s, {re.escape(change)}$", said, re.MULTILINE), said
    assert "after 1 step of warm-up" in said
    assert "single on cpu, 1 thread\n" in said

    card = (result.folder / "README.md").read_text()
    for line in (
        "method: lora", "rank: 4", "alpha: 16", "targets: all-linear", "learning rate: 0.01", "schedule: cosine",
        "batch size: 6", "steps of the run: 3", "step: 3", "rows: 40",
    ):  # fmt: skip
        assert f"\n- {line}\n" in card
    assert re.search(r"^- label tokens of the rows: \d+$", card, re.MULTILINE)

    lorakit.train(recipe(train={"steps": 6, "warmup_steps": 1}))
    assert re.search(r"^done in [\d.]+ s since it went on, loss ", capsys.readouterr().out, re.MULTILINE)
