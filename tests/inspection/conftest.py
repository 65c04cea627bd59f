"""A finished run with held-out rows."""

import json
from pathlib import Path

import pytest

from tests.helpers.rows import write_uneven_rows
from tests.helpers.training import train


@pytest.fixture(scope="session")
def finished_run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train 6 steps, with an evaluation after every 2; read it only."""
    folder = tmp_path_factory.mktemp("runs")
    rows = str(write_uneven_rows(folder / "rows.jsonl", 12))
    recipe = {
        "base": {"model": str(base), "dtype": "float32"},
        "adapter": {"rank": 2},
        "data": {"train": rows, "eval": rows, "max_tokens": 64},
        "train": {"steps": 6, "batch_size": 4, "learning_rate": 0.01, "warmup_steps": 1, "eval_every_steps": 2},
        "output": str(folder / "first"),
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return train(folder / "recipe.yaml")[0]
