"""Long work counts as progress, unit by unit, so that the watchdog of a run does not end it."""

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lorakit
from lorakit import Callback
from lorakit.data.row_settings import RowSettings
from lorakit.files import progress
from lorakit.files.atomic import manifest_matches, write_file, write_manifest
from lorakit.files.base_files import open_base_files
from lorakit.files.progress import library_call, progress_count
from lorakit.files.safetensors import file_parts, open_tensors
from lorakit.patch.fingerprint import BaseIdentity, fingerprint
from lorakit.recipe import load_recipe
from lorakit.training.callbacks import Evaluation, Hooks, Step
from lorakit.training.loop import run
from tests.helpers.rows import tokenize_rows, write_uneven_rows


def units(work: Callable[[], Any]) -> int:
    """Return the units that are counted for some work."""
    before = progress_count()
    work()
    return progress_count() - before


def test_every_micro_batch_of_a_step_and_of_an_evaluation_is_progress(recipe: Callable[..., Path]) -> None:
    counts: dict[str, int] = {}

    class Counts(Callback):
        def on_step(self, step: Step) -> None:
            counts[f"step {step.number}"] = progress_count()

        def on_evaluation(self, evaluation: Evaluation) -> None:
            counts[f"evaluation {evaluation.step}"] = progress_count()

    train = {"steps": 5, "save_every_steps": 50, "eval_every_steps": 4, "batch_size": 6, "micro_batch_size": 2}
    settings = load_recipe(recipe(train=train, data={"packing": False}))
    run(settings, say=lambda text: None, hooks=Hooks(callbacks=(Counts(),)))

    assert counts["step 3"] - counts["step 2"] >= 3
    assert counts["evaluation 4"] - counts["step 4"] >= 20


def test_every_chunk_of_rows_is_progress(tmp_path: Path, tokenizer: Any) -> None:
    rows = str(write_uneven_rows(tmp_path / "rows.jsonl", 4 * 256))
    assert units(lambda: tokenize_rows(rows, "train", tokenizer, RowSettings(64, "truncate", "stop", "assistant"))) >= 4


def test_every_tensor_that_is_read_written_or_hashed_is_progress(base: Path) -> None:
    file = open_tensors(base / "model.safetensors")
    tensors = {name: file.read(name) for name in file.entries}
    modules = [name.removesuffix(".weight") for name in tensors if "proj" in name]

    assert units(lambda: [file.read(name) for name in tensors]) >= len(tensors)
    assert units(lambda: io.BytesIO().writelines(file_parts(tensors, {}))) >= len(tensors)
    assert units(lambda: fingerprint(BaseIdentity(open_base_files(base)), modules)) >= len(modules)


def test_every_file_that_is_written_or_verified_is_progress(tmp_path: Path) -> None:
    assert units(lambda: [write_file(tmp_path / str(number), "x") for number in range(4)]) >= 4
    assert units(lambda: write_manifest(tmp_path)) >= 4
    assert units(lambda: manifest_matches(tmp_path)) >= 4


def test_every_token_of_an_answer_is_progress(base: Path) -> None:
    model = lorakit.load(base, dtype="float32")
    assert units(lambda: model.generate(["one", "two"], max_new_tokens=6)) >= 2


def test_cpu_time_is_progress_in_a_call_of_a_library_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "CPU_SECONDS", 0.001)

    def compute() -> None:
        until = time.process_time() + 0.05
        while time.process_time() < until:
            pass

    assert units(compute) == 0
    with library_call():
        assert units(compute) >= 40
    assert units(compute) == 0
