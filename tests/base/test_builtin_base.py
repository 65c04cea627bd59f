"""The built-in base, its tasks and the shipped patches are what the documents say."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lorakit
from lorakit.base.find import find_base
from lorakit.base.transformers_io import load_tokenizer
from lorakit.errors import PatchError
from lorakit.inference.score import score
from lorakit.patch import read_patch
from lorakit.recipe import Recipe, load_recipe
from scripts.tiny_base import tasks

ROOT = Path(__file__).parents[2]
SHIPPED = ["json", "pirate", "zorvian"]
TOKENIZER = load_tokenizer(find_base("builtin:tiny"))


def test_the_base_is_small_enough_and_says_what_it_is() -> None:
    folder = find_base("builtin:tiny")

    assert sum(path.stat().st_size for path in folder.iterdir()) < 8_000_000
    card = (folder / "README.md").read_text()
    assert "python -m scripts.tiny_base.make" in card
    assert "license: apache-2.0" in card


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_the_tokenizer_gives_any_text_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text, add_special_tokens=False)["input_ids"]) == text


def test_the_rows_of_the_tasks_are_what_the_generator_writes(tmp_path: Path) -> None:
    for task in tasks.TASKS:
        tasks.write_task(task, tmp_path / task)

    written = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*.jsonl")}
    assert written == {p.relative_to(ROOT / "data"): p.read_bytes() for p in (ROOT / "data").rglob("*.jsonl")}
    assert len(written) == 16


@pytest.mark.parametrize("task", [*SHIPPED, "telegram"])
def test_no_held_out_prompt_is_in_the_training_rows(task: str) -> None:
    def prompts(name: str) -> set[str]:
        lines = (ROOT / "data" / task / name).read_text().splitlines()
        return {json.loads(line)["messages"][0]["content"] for line in lines}

    assert len(prompts("eval.jsonl")) == 100
    assert not prompts("eval.jsonl") & prompts("train.jsonl")


@pytest.fixture(scope="module")
def model() -> Any:
    return lorakit.load("builtin:tiny", {task: ROOT / "adapters" / task for task in SHIPPED}, dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    "task", [task if task == "zorvian" else pytest.param(task, marks=pytest.mark.matrix) for task in SHIPPED]
)
def test_a_shipped_patch_answers_held_out_rows_that_the_base_cannot(model: Any, task: str) -> None:
    file = str(ROOT / "data" / task / "eval.jsonl")

    answered = score(model, {file: [None, task]}, max_new_tokens=64).answers

    assert sum(answer.correct for answer in answered[file, None]) <= 20
    assert sum(answer.correct for answer in answered[file, task]) >= 95


@pytest.mark.parametrize("task", SHIPPED)
def test_a_shipped_patch_is_small_and_made_by_its_recipe(task: str) -> None:
    folder = ROOT / "adapters" / task
    recipe = load_recipe(ROOT / "recipes" / f"{task}.yaml").model_dump(mode="json")
    patch = read_patch(folder)

    assert (folder / "adapter_model.safetensors").stat().st_size < 1_000_000
    recorded = Recipe.model_validate_json(json.dumps(patch.metadata["recipe"] | {"output": "x"})).model_dump(
        mode="json"
    )
    for section in ("base", "adapter", "data", "train"):  # keys that came later have their defaults
        assert recorded[section] == recipe[section]
    assert {layer.rank for layer in patch.layers.values()} == {8}


def test_the_same_prompt_is_answered_differently_by_each_adapter(model: Any) -> None:
    prompt = "Mira from Oslo ordered 3 lamps on Monday."

    answers = model.generate([prompt] * 4, adapters=[*SHIPPED, None], max_new_tokens=64)

    assert len(set(answers)) == 4
    assert json.loads(answers[0])["name"] == "Mira"


@pytest.mark.parametrize("task", SHIPPED)
def test_a_shipped_patch_whose_scale_is_edited_is_refused(task: str, tmp_path: Path) -> None:
    patch = tmp_path / task
    shutil.copytree(ROOT / "adapters" / task, patch)
    config = json.loads((patch / "adapter_config.json").read_text())
    (patch / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 64}))
    with pytest.raises(PatchError, match="lora_alpha 64, saved with 16"):
        read_patch(patch)
