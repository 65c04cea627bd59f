"""The base's own dropout is off while it trains, and the run says so."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lorakit.base.loading import disable_dropout, dropout_notes
from lorakit.run.metrics import read_metrics
from lorakit.training.start import train
from scripts.zoo.trial import make_small
from tests.helpers.models import ARCHITECTURES

BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1}),
    "opt": ("opt", {"dropout": 0.1}),
    "phi": ("phi", {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
                    "vocab_size": 64, "resid_pdrop": 0.1}),
    "mixtral": ("mixtral", {"router_jitter_noise": 0.1}),
    "llama_attention": ("llama", {"attention_dropout": 0.1}),
}  # fmt: skip


@pytest.mark.parametrize("name", BASES)
def test_a_base_whose_dropout_is_off_answers_the_same_twice_while_it_trains(name: str) -> None:
    architecture, settings = BASES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **{**ARCHITECTURES.get(architecture, {}), **settings})
    model = AutoModelForCausalLM.from_config(config).train()
    ids = torch.arange(3, 35)[None]
    with torch.no_grad():
        assert not torch.equal(model(ids).logits, model(ids).logits)

        rates = disable_dropout(model)

        assert torch.equal(model(ids).logits, model(ids).logits)
    assert {key: rate for key, rate in settings.items() if isinstance(rate, float)}.items() <= rates.items()
    assert not [rate for rate in disable_dropout(model) if "drop" in rate]


def test_a_router_with_jitter_computes_in_training_what_it_computes_in_use(tmp_path: Path, tokenizer: Any) -> None:
    """PhiMoE's reads its jitter in evaluation too, and draws in training whatever its jitter is."""
    model = AutoModelForCausalLM.from_pretrained(make_small("phimoe", tokenizer, tmp_path / "phimoe")).eval()
    ids = torch.arange(5, 35)[None]
    with torch.no_grad():
        before = model(ids).logits
        assert disable_dropout(model)["router_jitter_noise"] > 0
        for mode in (True, False):
            assert torch.equal(model.train(mode)(ids).logits, before)
    assert copy.deepcopy(model).train().model.layers[0].mlp.router.training is False
    assert model.train().model.layers[0].self_attn.training


@pytest.mark.matrix
def test_a_base_with_dropout_learns_the_same_packed_and_padded(
    recipe: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], tokenizer: Any
) -> None:
    settings = ARCHITECTURES["gpt2"] | {"vocab_size": len(tokenizer), "resid_pdrop": 0.3, "embd_pdrop": 0.3}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **settings)).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    losses: dict[bool, list[float]] = {}
    for packing in (True, False):
        path = recipe(
            base={"model": str(tmp_path / "gpt2")}, data={"packing": packing}, output=str(tmp_path / str(packing))
        )
        metrics = read_metrics(train(path).folder / "metrics.jsonl")
        losses[packing] = [line["loss"] for line in metrics if "loss" in line]
        assert "the base's own dropout is off while it trains (" in capfd.readouterr().out

    assert len(losses[True]) > 1
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)


def test_a_base_without_dropout_gets_no_note() -> None:
    config = AutoConfig.for_model("llama", **ARCHITECTURES["llama"])
    assert dropout_notes(disable_dropout(AutoModelForCausalLM.from_config(config))) == ()
