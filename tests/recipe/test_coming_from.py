"""docs/coming-from.md: its recipes are files that pass `lorakit check`, and its keys exist."""

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from lorakit.cli import main
from lorakit.patch import read_patch
from lorakit.recipe import load_recipe
from lorakit.recipe.explain import FOREIGN_KEYS, SHARED
from lorakit.recipe.schema import Recipe, count_warmup_steps
from tests.helpers.rows import write_uneven_rows

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "coming-from.md").read_text()
RECIPES = sorted((ROOT / "recipes" / "coming-from").glob("*.yaml"))
IN_MAKE_TEST = ("axolotl", "unsloth")


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[] if path.stem in IN_MAKE_TEST else [pytest.mark.matrix]) for path in RECIPES],
    ids=lambda path: path.stem,
)
def test_a_translated_recipe_is_on_the_page_passes_check_and_trains(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, recipe = path.read_text().split("\n", 1)
    assert first == "# yaml-language-server: $schema=../../docs/recipe.schema.json"
    assert f"```yaml\n# recipes/coming-from/{path.name}\n{recipe}```" in PAGE

    monkeypatch.chdir(tmp_path)
    data = load_recipe(path).data
    for source in (*data.train_sources(), *data.eval_sources()):
        write_uneven_rows(tmp_path / str(source.path), 400)
    here = ["base.model=builtin:tiny", "data.max_tokens=128", "train.log_to=[]"]
    assert main(["check", str(path), *here]) == 0, capsys.readouterr().err
    assert "nothing is wrong with this recipe" in capsys.readouterr().out
    short = [
        "train.epochs=null",
        "train.steps=2",
        "train.warmup_steps=0",
        "train.warmup_ratio=null",
        "train.batch_size=2",
    ]
    alone = [
        "base.dtype=float32",
        "train.micro_batch_size=2",
        "parallel.backend=single",
        "parallel.processes=1",
        "output=out",
    ]
    assert main(["train", str(path), *here, *short, *alone]) == 0, capsys.readouterr().err
    assert read_patch("out").metadata["step"] == 2


def keys(value: Any, prefix: str = "") -> set[str]:
    """Return the dotted keys of a section and of those in it."""
    found = set()
    for name, field in value.model_fields.items():
        found |= {f"{prefix}{name}"}
        if hasattr(field.annotation, "model_fields"):
            found |= keys(field.annotation, f"{prefix}{name}.")
    return found


def test_every_key_on_the_page_exists() -> None:
    known = keys(Recipe)
    sections = "|".join(Recipe.model_fields)
    named = set(re.findall(rf"`((?:{sections})\.\w+)", PAGE))
    assert len(named) > 40
    assert named <= known


def rows_of(section: str) -> list[list[str]]:
    """Return the cells of the tables in a section of the page, and of those before the first section."""
    parts = PAGE.split("\n## ")
    text = "\n".join(part for part in parts if part.startswith(("What differs", f"{section}\n")))
    return [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]


@pytest.mark.parametrize(
    ("section", "key", "ours"),
    [
        ("every tool" if tool in SHARED else tool, key, ours)
        for tool, table in FOREIGN_KEYS.items()
        for key, ours in table.items()
    ],
)
def test_what_the_code_says_of_another_tools_key_is_on_the_page(section: str, key: str, ours: str) -> None:
    cells = [theirs_and_ours for theirs_and_ours in rows_of(section) if re.search(rf"`{key}\b", theirs_and_ours[0])]
    assert cells, "no row"
    named = set(re.findall(r"\b(?:base|adapter|data|train|parallel|objective|evaluation)\.\w+", ours))
    assert any(all(f"`{path}" in row[1] for path in named) for row in cells), cells
    assert named <= keys(Recipe)


def test_every_program_has_a_recipe() -> None:
    assert {path.stem for path in RECIPES} == {"trl", "axolotl", "llama-factory", "unsloth"}
    for title in ("TRL", "axolotl", "LLaMA-Factory", "unsloth"):
        assert f"\n## {title}\n" in PAGE


@pytest.mark.parametrize(
    ("text", "tool"),
    [
        ("base_model: x\nadapter: qlora\nlora_r: 32\nsequence_len: 2048\n", "axolotl"),
        (
            "model_name_or_path: x\nstage: sft\nfinetuning_type: lora\nlora_rank: 8\nwarmup_ratio: 0.1\n",
            "LLaMA-Factory",
        ),
        ("model_name_or_path: x\ndataset_name: y\nuse_peft: true\nmax_length: 1024\nlora_r: 8\n", "TRL"),
        ("model_name: x\nmax_seq_length: 2048\nrandom_state: 3407\nper_device_train_batch_size: 2\n", "unsloth"),
        ("learning_rate: 1e-4\nnum_train_epochs: 3\nwarmup_steps: 5\n", "transformers' Trainer"),
    ],
)
def test_a_file_of_another_tool_is_answered_with_its_keys_and_lorakits(
    text: str, tool: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "theirs.yml"
    path.write_text(text + "nothing_here: [1, 2]\noutput_dir: out\n")

    assert main(["check", str(path), "adapter.rank=4"]) == 2

    error = capsys.readouterr().err
    assert f"{path}: this is a configuration of {tool}, not a recipe." in error
    lines = {line.split(":")[0].strip(): line.split() for line in error.splitlines() if line.startswith("  ")}
    assert [*lines] == [line.split(":")[0] for line in path.read_text().splitlines()]
    assert lines["output_dir"][-1] == "output"
    assert "see docs/coming-from.md" in " ".join(lines["nothing_here"])
    if tool != "transformers' Trainer":
        copied = error.rpartition("--from ")[2].partition("`")[0]
        assert main(["init", "--from", copied, "--out", str(tmp_path / "copy.yaml")]) == 0


def test_a_recipe_with_keys_of_another_tool_is_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mixed.yaml"
    path.write_text(
        "base: {model: builtin:tiny}\ndata: {train: x.jsonl}\noutput: out\nlora_r: 3\nnum_epochs: 1\nlora_alpha: 2\n"
        "train: {gradient_accumulation_steps: 4, warmup_steps: 0.1, logging_steps: 1}\nadapter: {method: qlora}\n"
    )
    assert main(["check", str(path)]) == 2

    error = capsys.readouterr().err
    assert "configuration of" not in error
    for line in (
        "lora_r: unknown key. Nearest: 'adapter.rank'.",
        "train.gradient_accumulation_steps: unknown key. A key of other trainers; in lorakit part of train.batch_size:",
        "train.warmup_steps: a number of steps, got 0.1; a share of all steps is train.warmup_ratio: 0.1",
        "train.logging_steps: unknown key. A key of other trainers; in lorakit nothing to set: every step is logged.",
        "got 'qlora'. QLoRA is method: lora on a quantised base, base.quantize: nf4.",
    ):
        assert line in error, error


def test_a_ratio_of_warm_up_is_rounded_as_in_transformers(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("base: {model: b}\ndata: {train: x}\noutput: o\ntrain: {warmup_ratio: 0.25}\n")
    recipe = load_recipe(path)
    theirs = TrainingArguments(output_dir=str(tmp_path), warmup_steps=0.25)
    for steps in range(2, 30):
        assert count_warmup_steps(recipe, steps) == theirs.get_warmup_steps(steps)
