"""Methods, targets and packed bases on every backend: the run is that of one process, and parts are really parts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from tests.conftest import chat, make_base, write_rows
from tests.test_backends import launch

pytestmark = pytest.mark.spread

Case = dict[str, Any]
SHAPE: dict[str, Any] = {
    "hidden_size": 36, "intermediate_size": 50, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 10,
}  # fmt: skip
CASES: list[Case] = [
    {"name": "nf4", "quantize": "nf4"},
    {"name": "int8", "quantize": "int8", "checkpointing": True},
    {"name": "nf4-dora", "quantize": "nf4", "adapter": {"method": "dora"}},
    {"name": "nf4-pissa", "quantize": "nf4", "adapter": {"init": "pissa"}},
    {"name": "dora", "adapter": {"method": "rsdora", "targets": ["embed_tokens", "q_proj", "down_proj"]}},
    {"name": "pissa", "adapter": {"init": "pissa", "targets": ["q_proj", "down_proj"]}},
    {"name": "olora", "adapter": {"init": "olora", "targets": ["q_proj"]}},
    {"name": "lora_fa", "adapter": {"method": "lora_fa"}, "ratio": 4.0},
    {"name": "whole", "adapter": {"modules_to_save": ["lm_head", "norm"], "trainable_tokens": [10, 11, 12]}},
    {"name": "tied", "base": "tied", "adapter": {"targets": ["embed_tokens", "q_proj"], "tied_head": "both"}},
    {"name": "tied-rows", "base": "tied", "adapter": {"targets": ["q_proj"], "trainable_tokens": [10, 11]}},
    {"name": "tied-whole", "base": "tied", "adapter": {"targets": ["q_proj"], "modules_to_save": ["embed_tokens"], "tied_head": "both"}},
    {"name": "biases", "base": "biased", "adapter": {"targets": ["q_proj"], "bias": "all"}},
    {"name": "experts", "base": "experts", "adapter": {"targets": ["q_proj"], "target_parameters": "all-experts"}},
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("methods")
    make_base(folder / "base", tokenizer, **SHAPE)
    make_base(folder / "tied", tokenizer, **SHAPE, tie_word_embeddings=True)
    make_base(folder / "biased", tokenizer, **SHAPE, attention_bias=True, mlp_bias=True)
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=3, num_experts_per_tok=2, vocab_size=len(tokenizer), initializer_range=0.1,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(folder / "experts")
    tokenizer.save_pretrained(folder / "experts")
    write_rows(folder / "rows.jsonl", [chat(f"say {i}", "so " * (1 + i * 7 % 11) + str(i)) for i in range(41)])
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    return launch(folder, 1, cases("single"))


def cases(backend: str) -> list[Case]:
    ahead = {"prefetch_mb": 0.0} if backend == "zero3" else {}  # so small a base would all be fetched ahead
    return [case | {"steps": 4, "parallel": {"backend": backend, **ahead}} for case in CASES]


@pytest.mark.parametrize("backend", ["ddp", "zero2", "zero3", "fsdp2"])
def test_two_processes_train_what_one_does(backend: str, folder: Path, alone: dict[str, Any]) -> None:
    found = launch(folder, 2, cases(backend))

    for name, expected in alone.items():
        got = found[name]
        assert got["unreached"] == []
        torch.testing.assert_close(torch.tensor(got["losses"]), torch.tensor(expected["losses"]), rtol=2e-5, atol=0)
        assert got["adapter"].keys() == expected["adapter"].keys()
        for key, tensor in expected["adapter"].items():
            torch.testing.assert_close(got["adapter"][key], tensor, rtol=2e-3, atol=2e-5, msg=f"{name}: {key}")
    whole, part = (one["nf4"]["ranks"][0]["base_bytes"] for one in (alone, found))
    assert part == whole if backend in ("ddp", "zero2") else 0.49 < part / whole < 0.55
