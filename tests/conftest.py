"""Small real models, rows and recipes for the tests. One thread: two processes share two cores."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lorakit.base.load import find_base
from lorakit.parallel.deepspeed_requirements import extensions_folder

torch.set_num_threads(1)


os.environ["TORCH_EXTENSIONS_DIR"] = str(extensions_folder())  # compiled once, not anew in every own cache


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(find_base("builtin:tiny"))


def make_base(folder: Path, tokenizer: Any, *, seed: int = 0, **settings: Any) -> Path:
    """A random Llama in a folder, with the built-in tokenizer."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": len(tokenizer), "max_position_embeddings": 256, "initializer_range": 0.1,
            "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id, **settings,
        }
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    return make_base(tmp_path_factory.mktemp("bases") / "llama", tokenizer)


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(user: str, assistant: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Forty rows of uneven length."""
    return write_rows(tmp_path / "rows.jsonl", [chat(f"say {i}", "so " * (1 + i * 7 % 11) + str(i)) for i in range(40)])


@pytest.fixture
def recipe(tmp_path: Path, base: Path, rows: Path) -> Callable[..., Path]:
    """A recipe file for the small base and rows; keyword arguments are whole sections."""

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


def nearest(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 rounded once, another way than lorakit does it: numpy for float16, on the bits for bfloat16."""
    if dtype is torch.float16:
        return torch.from_numpy(exact.numpy().astype("float16"))
    if dtype is torch.bfloat16:  # drop 45 bits, ties to even
        bits = exact.view(torch.int64)
        bits = bits + (1 << 44) - 1 + ((bits >> 45) & 1)
        return (bits & ~((1 << 45) - 1)).view(torch.float64).to(dtype)
    return exact.to(dtype)
