"""docs/coming-from.md: its recipes are files that pass `lorakit check`, and its keys exist."""

import re
from pathlib import Path
from typing import Any

import pytest

from lorakit.cli import main
from lorakit.patch import read_patch
from lorakit.recipe import load_recipe
from lorakit.recipe.schema import Recipe
from tests.helpers.rows import write_uneven_rows

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "coming-from.md").read_text()
RECIPES = sorted((ROOT / "recipes" / "coming-from").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
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
    alone = ["train.micro_batch_size=2", "parallel.backend=single", "parallel.processes=1", "output=out"]
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


def test_every_program_has_a_recipe() -> None:
    assert {path.stem for path in RECIPES} == {"trl", "axolotl", "llama-factory", "unsloth"}
    for title in ("TRL", "axolotl", "LLaMA-Factory", "unsloth"):
        assert f"\n## {title}\n" in PAGE
