"""A hub data set that is streamed: only the rows of `limit` are read, and nothing but their tokens is stored.

The data sets are folders, which `datasets` streams by the same code as those of the hub.
"""

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from lorakit.data.dataset import TokenDataset
from lorakit.data.encode_chunks import CHUNK_ROWS, _read_chunks
from lorakit.data.find_rows import find_sources
from lorakit.data.load import load_datasets
from lorakit.data.row_settings import RowSettings
from lorakit.data.rows import read_rows
from lorakit.data.token_cache import tokenize_sources
from lorakit.errors import DataError, LorakitError, RunError, TemporaryFailure
from lorakit.recipe import load_recipe
from lorakit.run.display import row_progress
from lorakit.training.check import check
from tests.helpers.rows import chat, write_rows
from tests.helpers.training import stop_at, train

SETTINGS = RowSettings(64, "stop", "stop", "answer", limit=1_400)


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `datasets` stores what it prepares."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "stored")
    return tmp_path / "stored"


@pytest.fixture
def folder(tmp_path: Path, stored: Path) -> Path:
    """A data set of two files of 1,000 rows, and a third one that cannot be read."""
    (tmp_path / "set").mkdir()
    for number in range(2):
        rows = [chat(f"say {1_000 * number + i}", "so " * (1 + i % 3)) for i in range(1_000)]
        write_rows(tmp_path / "set" / f"train-{number}.jsonl", rows)
    (tmp_path / "set" / "train-2.jsonl").write_text('{"messages": [')
    return tmp_path / "set"


def streamed(folder: Path, tokenizer: Any, **arguments: Any) -> TokenDataset:
    return tokenize_sources(find_sources(str(folder), "train", streaming=True), tokenizer, SETTINGS, **arguments)


def test_the_first_rows_are_read_in_their_order_and_no_other(folder: Path, stored: Path, tokenizer: Any) -> None:
    rows = streamed(folder, tokenizer)

    files = find_sources(tuple(str(folder / f"train-{number}.jsonl") for number in range(2)), "train")
    read = tokenize_sources(files, tokenizer, SETTINGS)
    assert len(rows) == SETTINGS.limit
    assert all((rows.ids(row) == read.ids(row)).all() for row in range(len(read)))
    assert rows.location(1_399) == f"{folder}:1400"
    assert not [path for path in stored.rglob("*") if path.is_file() and path.suffix != ".lock"]


@pytest.mark.matrix
def test_rows_in_memory_do_not_grow_with_those_that_were_read(folder: Path) -> None:
    def in_memory() -> int:
        gc.collect()
        return sum(type(each) is dict and "messages" in each for each in gc.get_objects())

    chunks = _read_chunks(find_sources(str(folder), "train", streaming=True), 1_900)
    counts = [in_memory() for number, _ in enumerate(chunks) if number in (2, 7)]

    assert len(counts) == 2
    assert max(counts) <= 3 * CHUNK_ROWS


@pytest.mark.matrix
def test_an_interrupted_call_goes_on_and_gives_the_same_rows(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        streamed(folder, tokenizer, progress=lambda done, total: done > 1_000 and 1 // 0)

    went_on = streamed(folder, tokenizer)

    os.environ["XDG_CACHE_HOME"] = str(tmp_path / "other")
    assert went_on.digest == streamed(folder, tokenizer).digest


def test_what_cannot_be_streamed_is_named(folder: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"train-0.jsonl: `streaming` is for data sets of the hub"):
        find_sources(str(folder / "train-0.jsonl"), "train", streaming=True)
    beyond = RowSettings(64, "stop", "stop", "answer", limit=2_001)
    with pytest.raises(DataError, match="set: cannot be read after row 2000"):
        tokenize_sources(find_sources(str(folder), "train", streaming=True), tokenizer, beyond)
    before = find_sources(str(folder), "train", streaming=True)[0].version()
    os.utime(folder / "train-0.jsonl", (1, 1))
    assert find_sources(str(folder), "train", streaming=True)[0].version() != before


def test_a_stream_without_an_end_is_refused(recipe: Callable[..., Path]) -> None:
    with pytest.raises(LorakitError, match="a stream has no length, so give `limit`"):
        load_recipe(recipe(data={"train": {"path": "org/set", "streaming": True}}))


def test_a_run_on_a_stream_holds_rows_out_goes_on_and_notices_other_rows(
    recipe: Callable[..., Path], folder: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"train": {"path": str(folder), "streaming": True, "limit": 300}, "eval": 0.1}
    path = recipe(data=data, train={"steps": 4, "save_every_steps": 1, "eval_every_steps": 4})
    training, held_out = load_datasets(load_recipe(path), tokenizer, row_progress).values()
    assert len(training) + len(held_out) == 300
    locations = [rows.location(row) for rows in (training, held_out) for row in range(len(rows))]
    assert set(locations) == {f"{folder}:{number}" for number in range(1, 301)}
    check(load_recipe(path), say=lambda text: None)

    first, _ = train(path, f"output={tmp_path / 'first'}")
    stop_at(monkeypatch, {2})
    with pytest.raises(TemporaryFailure):
        train(path)
    second, _ = train(path)

    tensors = "adapter_model.safetensors"
    assert (first / tensors).read_bytes() == (second / tensors).read_bytes()
    assert json.loads((second / "run.json").read_text())["data"]["train"]["digest"] == training.digest
    lines = (folder / "train-0.jsonl").read_text().replace("say 7", "tell 7")
    (folder / "train-0.jsonl").write_text(lines)
    with pytest.raises(RunError, match="data"):
        train(path, "train.steps=6")


def test_a_subset_is_read_by_its_name_and_the_names_are_listed_without_one(tmp_path: Path, stored: Path) -> None:
    for name in ("main", "socratic"):
        (tmp_path / "set" / name).mkdir(parents=True)
        write_rows(tmp_path / "set" / name / "train.jsonl", [{"text": name}])
    configs = [{"config_name": name, "data_files": f"{name}/*.jsonl"} for name in ("main", "socratic")]
    (tmp_path / "set" / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    sources = [
        find_sources(str(tmp_path / "set"), "train", streaming=True, subset=subset)[0]
        for subset in ("main", "socratic", None)
    ]

    assert [row for _, row in read_rows(sources[1])] == [{"text": "socratic"}]
    assert sources[0].version() != sources[1].version()
    with pytest.raises(DataError, match="several subsets, so name one .`subset` beside `path`.: main, socratic"):
        list(read_rows(sources[2]))
    with pytest.raises(DataError, match="`subset` and `revision` are for data sets of the hub"):
        find_sources(str(tmp_path / "set" / "main" / "train.jsonl"), "train", subset="main")
