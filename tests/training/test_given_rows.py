"""Rows that Python gives in memory are trained as the same rows of a file, once and when a run goes on."""

import json
import re
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from safetensors.torch import load_file

import lorakit
from lorakit.cli import main
from lorakit.data.row_settings import RowSettings
from lorakit.data.token_cache import cache_entries, trim_cache
from lorakit.errors import RecipeError
from lorakit.files.atomic import cache_folder
from lorakit.training.start import rows_as_file, without_rows
from tests.helpers.rows import chat, tokenize_rows

Recipe = Callable[..., Path]
ROWS = [chat(f"say {i}", "so " * (1 + i * 7 % 11) + str(i)) for i in range(40)]  # those of the fixture's file


def content(recipe: Recipe, output: Path, **sections: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(recipe(train={"steps": 4, "save_every_steps": 2}, **sections).read_text())
    return values | {"output": str(output)}


def patch(folder: Path) -> dict[str, list[Any]]:
    """Return the tensors of a patch; its header names the files of rows."""
    return {name: tensor.tolist() for name, tensor in load_file(folder / "adapter_model.safetensors").items()}


@pytest.fixture
def of_file(recipe: Recipe, tmp_path: Path) -> Any:
    return patch(lorakit.train(content(recipe, tmp_path / "file")).folder)


@pytest.mark.parametrize("kind", ["list", "dataset", "source", "override"])
def test_rows_in_memory_are_trained_as_those_of_a_file(recipe: Recipe, tmp_path: Path, of_file: Any, kind: str) -> None:
    values = content(recipe, tmp_path / "memory")
    rows: Any = datasets.Dataset.from_list(ROWS) if kind == "dataset" else ROWS
    values["data"] |= {"train": [{"path": rows}] if kind == "source" else rows, "eval": rows}
    if kind == "override":
        values["data"]["train"] = "none.jsonl"
        result = lorakit.train(values, **{"data.train": rows})
    else:
        result = lorakit.train(values)
    assert patch(result.folder) == of_file


@pytest.mark.matrix
def test_a_run_on_rows_in_memory_goes_on_and_names_their_file(recipe: Recipe, tmp_path: Path, of_file: Any) -> None:
    class Stop(lorakit.Callback):
        def on_step(self, step: Any) -> None:
            raise lorakit.StopTraining("here")

    values = content(recipe, tmp_path / "memory", data={"train": ROWS, "eval": ROWS})
    assert lorakit.train(values, callbacks=[Stop()]).status == "stopped"
    file = Path(json.loads((tmp_path / "memory" / "run.json").read_text())["recipe"]["data"]["train"])
    assert file.parent == cache_folder("rows")
    file.unlink()  # a cache may be deleted
    assert patch(lorakit.train(values).folder) == of_file
    values["data"]["train"] = [*ROWS[1:], chat("say", "other")]
    with pytest.raises(lorakit.LorakitError, match="data.train"):
        lorakit.train(values)


def test_the_same_rows_are_one_file_however_they_are_given() -> None:
    rows = [UserDict({"text": "é", "id": np.int64(3), "tags": ("a",)})]
    as_dataset = datasets.Dataset.from_list([{"text": "é", "id": 3, "tags": ["a"]}]).with_format(
        "numpy", columns=["id"]
    )
    (train, held) = without_rows("data", {"train": rows, "eval": [as_dataset]}).values()
    assert [train] == held
    assert Path(train).read_text() == '{"text": "\\u00e9", "id": 3, "tags": ["a"]}\n'
    assert rows_as_file("data.train", "a.jsonl") == "a.jsonl"
    assert rows_as_file("data.eval", 0.1) == 0.1
    sources = ["a", {"path": "b", "weight": 2.0}, {"path": ["c", "d"]}]
    assert rows_as_file("data.train", sources) == sources
    assert rows_as_file("data.train", [{"path": rows, "name": "x"}]) == [{"path": train, "name": "x"}]
    assert not list(cache_folder("rows").glob(".*"))


def test_the_cache_command_shows_and_removes_them(capsys: pytest.CaptureFixture[str]) -> None:
    file = Path(rows_as_file("data.train", ROWS))
    assert main(["cache"]) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"{file.name[:12]} .* {len(ROWS)} .* rows given in Python", shown)
    assert main(["cache", "--clear"]) == 0
    assert not file.exists()


def test_the_limit_of_the_cache_holds_for_them_but_none_in_use_is_removed(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = ("used", "old", "unread")
    files = {name: Path(rows_as_file("data.train", [{"text": f"{name} {i}"} for i in range(50)])) for name in names}
    tables = {name: tokenize_rows(str(files[name]), "train", tokenizer, RowSettings()) for name in names[:2]}
    entries = cache_entries()
    total = sum(entry.num_bytes for entry in entries)
    assert total > sum(file.stat().st_size for file in files.values())
    assert trim_cache(total) == []
    del tables["old"]
    assert len(trim_cache(0)) == 3  # the table of the old ones, their file, and the file that was not read
    assert {name: file.exists() for name, file in files.items()} == {"used": True, "old": False, "unread": False}
    assert tables["used"].ids(49).size
    assert main(["cache", "--clear"]) == 0
    assert "removed 0 of 2" in capsys.readouterr().out
    tables.clear()
    assert main(["cache", "--clear"]) == 0
    assert "removed 2 of 2" in capsys.readouterr().out
    assert not files["used"].exists()


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}), "got a DatasetDict; .* name a split"),
        (datasets.Dataset.from_list(ROWS).to_iterable_dataset(), "got a IterableDataset; make such a list of it"),
        (datasets.Dataset.from_list(ROWS).to_pandas(), r"got a DataFrame; .*rows.to_dict\('records'\)"),
        ((row for row in ROWS), r"got a generator; .*list\(rows\)"),
        ([{"text": b"a"}], "data.train: row 1: a row has text, numbers, .*: got \"b'a'\", a bytes"),
        ([{"text": "a"}, {"text": {1, 2}}], "data.train: row 2: a row has text"),
        ([{"text": "a"}, "b.jsonl"], r"data.train.0.path: this key is required"),
        ({"text": "a"}, "data.train.path: this key is required"),
        ([], "data.train: the list is empty"),
        (object(), "only text, numbers"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_other_types_are_refused_with_what_to_do(recipe: Recipe, tmp_path: Path, rows: Any, expected: str) -> None:
    values = content(recipe, tmp_path / "out")
    values["data"]["train"] = rows
    with pytest.raises(RecipeError, match=expected):
        lorakit.train(values)
    assert not (tmp_path / "out").exists()
