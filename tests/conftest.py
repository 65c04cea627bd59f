"""Fixtures of every room: the tokenizer, a small base, rows and a recipe. One thread: two workers share two cores."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # without AMX rows are independent (decision 77)

import pytest
import torch
from transformers import AutoTokenizer

from lorakit.base.find import find_base
from tests.helpers.bases import make_base
from tests.helpers.rounding import nearest  # noqa: F401
from tests.helpers.rows import chat, write_rows, write_uneven_rows  # noqa: F401

torch.set_num_threads(1)
# shells start background jobs with SIGINT ignored, and nohup SIGHUP, which every process of a test would inherit
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(find_base("builtin:tiny"))


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    return make_base(tmp_path_factory.mktemp("bases") / "llama", tokenizer)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Forty rows of uneven length."""
    return write_uneven_rows(tmp_path / "rows.jsonl", 40)


@pytest.fixture
def recipe(tmp_path: Path, base: Path, rows: Path) -> Callable[..., Path]:
    """Write a recipe for the small base and rows; keyword arguments are sections, merged into the defaults."""

    def write(name: str = "recipe.yaml", **sections: Any) -> Path:
        content = {
            "base": {"model": str(base), "dtype": "float32"},
            "adapter": {"rank": 4, "dropout": 0.1},
            "data": {"train": str(rows), "eval": str(rows), "max_tokens": 64},
            "train": {
                "steps": 12, "batch_size": 6, "micro_batch_size": 4, "learning_rate": 0.01, "warmup_steps": 2,
                "save_every_steps": 3, "eval_every_steps": 5,
            },
            "output": str(tmp_path / "out"),
        }  # fmt: skip
        for key, value in sections.items():
            content[key] = {**content.get(key, {}), **value} if isinstance(value, dict) else value  # type: ignore[dict-item]
        path = tmp_path / name
        path.write_text(json.dumps(content, indent=1))  # JSON is YAML
        return path

    return write
