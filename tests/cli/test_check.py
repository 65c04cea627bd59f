"""`lorakit check`: what it says about the rows of a recipe."""

import errno
import re
from pathlib import Path
from typing import Any

import pytest

from lorakit.cli import main
from lorakit.data.dataset import TableWriter
from lorakit.files.cache import cache_folder
from tests.helpers.rows import chat, write_rows


@pytest.fixture
def shown(recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def check(train: list[Any], held_out: list[Any] | None = None, **data: Any) -> list[str]:
        files: dict[str, Any] = {"train": str(write_rows(tmp_path / "train.jsonl", train)), "eval": None}
        if held_out is not None:
            files["eval"] = str(write_rows(tmp_path / "eval.jsonl", held_out))
        assert main(["check", str(recipe(data=files | data))]) == 0
        return capsys.readouterr().out.splitlines()

    return check


def test_the_first_token_is_no_label_because_nothing_predicts_it(shown: Any) -> None:
    lines = shown([{"text": "some text"}])
    assert "s[[ome text<|end|>]]" in lines
    counts = next(line for line in lines if line.startswith("rows "))
    used, tokens, labels = (int(number) for number in re.findall(r"\d+", counts))
    assert (used, labels) == (1, tokens - 1)
    assert any(line.startswith("<|start|>[[<|user|>") for line in shown([chat("hi", "yes")], loss_on="all"))


def test_weights_and_mixed_formats_are_counted_where_there_are_any(shown: Any) -> None:
    weighted = [chat(f"say {number}", "so") | {"weight": weight} for number, weight in enumerate((0, 1, 2.5, 0.5))]
    lines = [line.strip() for line in shown([*weighted, {"prompt": "say ", "completion": "so"}])]
    assert any(line.endswith("; 1 of weight 0 left out") for line in lines)
    assert "note       train: weight: other than 1 in 2 of 4 rows, from 0.5 to 2.5" in lines
    assert "note       train: formats: 3 of conversations, 1 of plain text (no template)" in lines
    text = "\n".join(shown([chat("hi", "yes"), chat("hi", "no") | {"weight": 1}]))
    assert "weight:" not in text
    assert "formats:" not in text


def test_held_out_rows_that_are_training_rows_too_are_counted(shown: Any) -> None:
    rows = [chat(f"say {number}", "so") for number in range(8)]
    note = "held-out rows are training rows too"
    lines = shown(rows[:5], [*rows[3:], {"messages": rows[4]["messages"], "id": 1}])
    assert f"note       3 of 6 {note} (the same tokens)" in lines
    assert note not in "\n".join(shown(rows[:4], rows[4:]))


def test_a_full_disk_of_the_cache_is_no_mistake_of_the_recipe(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TableWriter, "append", full)
    rows = write_rows(tmp_path / "new.jsonl", [chat("never", "tokenised")])
    assert main(["check", str(recipe(data={"train": str(rows)}))]) == 75
    assert f"lorakit check: {cache_folder('tokens')}" in capsys.readouterr().err
