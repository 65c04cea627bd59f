"""A run on several sources: resumed to the byte, with a held-out loss for each, in the same files as any other run."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorakit.errors import RunError, TemporaryFailure
from lorakit.patch import read_patch
from lorakit.recipe import load_recipe
from lorakit.run.metrics import read_metrics
from lorakit.training.check import check
from tests.helpers.rows import write_uneven_rows
from tests.helpers.training import stop_at, train

TENSORS = "adapter_model.safetensors"


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    sources = [
        {"path": str(write_uneven_rows(tmp_path / "a.jsonl", 30)), "weight": 0.5, "name": "few"},
        {"path": str(write_uneven_rows(tmp_path / "b.jsonl", 25)), "limit": 20},
    ]
    return {"train": sources, "eval": 0.3}


@pytest.mark.matrix
def test_a_mixed_run_that_was_stopped_ends_in_the_same_bytes(
    recipe: Callable[..., Path],
    data: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    short = {"steps": 5, "warmup_steps": 0, "eval_every_steps": 9}
    through, said = train(recipe(data=data, train=short, output=str(tmp_path / "through")))
    path = recipe(data=data, train=short)
    stop_at(monkeypatch, {3})
    with pytest.raises(TemporaryFailure):
        train(path)
    with pytest.raises(RunError, match=r"data\.train: .*'weight': 0\.5.* before, .*'weight': 0\.7.* now"):
        train(path, f"data.train={json.dumps([{**data['train'][0], 'weight': 0.7}, data['train'][1]])}")

    out, resumed = train(path)

    assert "resuming   after step 3" in resumed
    assert (out / TENSORS).read_bytes() == (through / TENSORS).read_bytes()
    assert re.search(r"rows .*\(few \d+ of \d+ tokens x 0\.5 = \d+ an epoch, b\.jsonl \d+ of \d+ tokens; ", said)
    assert re.search(r"held-out loss \d.*, loss of few \d.*, loss of b\.jsonl \d", capsys.readouterr().err)
    (first, *_, last) = [line for line in read_metrics(out / "metrics.jsonl") if "eval_loss" in line]
    assert {"eval_loss/few", "eval_loss/b.jsonl", "eval_accuracy/few"} <= first.keys()
    labels = {source: last[f"eval_loss/{source}"] for source in ("few", "b.jsonl")}
    assert min(labels.values()) < last["eval_loss"] < max(labels.values())
    results = json.loads((out / "run.json").read_text())["results"]
    assert results["eval_loss/few"] == labels["few"]
    assert "few, last step" in resumed
    assert str(tmp_path) not in json.dumps(read_patch(out).metadata["recipe"]["data"])


def test_a_weight_is_said_with_the_rows_that_it_makes_of_an_epoch(
    recipe: Callable[..., Path], rows: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    tiny = [
        {"path": str(rows), "weight": 0.001, "name": "a", "limit": 12},
        str(write_uneven_rows(tmp_path / "b.jsonl", 9)),
    ]
    for sources in (tiny[:1], tiny):
        check(load_recipe(recipe(data={"train": sources, "eval": None})), say=said.append)
    _, started = train(recipe(data={"train": [{"path": str(rows), "weight": 0.25}], "eval": None}, train={"steps": 3}))

    text = "\n".join(said)
    for more in ("", r", b\.jsonl 9 of \d+ tokens; 10 an epoch"):
        assert re.search(rf"\(a 12 of \d+ tokens x 0\.001 = 1 an epoch{more}\)", text)
    assert re.search(r"rows .* label tokens \(x 0\.25 = 10 an epoch\)", started)
    assert "steps      3, with up to 6 rows each; 1.5 epochs" in started


def test_shared_rows_are_said_when_a_run_starts(recipe: Callable[..., Path], tmp_path: Path) -> None:
    rows = str(write_uneven_rows(tmp_path / "a.jsonl", 30))
    other = str(write_uneven_rows(tmp_path / "b.jsonl", 10))
    _, said = train(recipe(data={"train": rows, "eval": other}, train={"steps": 2, "warmup_steps": 0}))
    assert "note       10 of 10 held-out rows are training rows too (the same tokens)" in said
