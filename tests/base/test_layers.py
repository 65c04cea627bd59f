"""Layers are recomputed in backward with the same values, with inputs on the device or in host memory."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lorakit.base.layers import checkpoint_layers, gather_groups, repeated_layers
from lorakit.errors import RunError
from tests.helpers.models import ARCHITECTURES

IDS = torch.arange(3, 27).reshape(2, 12)


def small_model(architecture: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **ARCHITECTURES[architecture] | settings)
    return AutoModelForCausalLM.from_config(config).train()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model(IDS).logits.square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("offload", [False, True])
def test_recomputed_layers_have_the_same_gradients(offload: bool) -> None:
    model, plain = small_model("llama"), small_model("llama")

    checkpoint_layers(model, offload=offload)

    expected = gradients(plain)
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, expected[name]), name


def test_every_layer_is_recomputed_in_the_given_contexts() -> None:
    model = small_model("llama")
    calls = []
    checkpoint_layers(model, context_fn=lambda: (calls.append(1), (nullcontext(), nullcontext()))[1])  # type: ignore[func-returns-value]

    gradients(model)

    assert len(calls) == model.config.num_hidden_layers


def test_a_model_that_cannot_recompute_its_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("llama")
    monkeypatch.setattr(type(model), "supports_gradient_checkpointing", False)
    with pytest.raises(RunError, match="LlamaForCausalLM cannot recompute its layers; use none"):
        checkpoint_layers(model)


@pytest.mark.parametrize("tied", [False, True])
def test_layers_and_an_untied_embedding_are_gathered_one_at_a_time(tied: bool) -> None:
    model = small_model("llama", tie_word_embeddings=tied)

    layers = list(repeated_layers(model))
    assert layers == list(model.model.layers)
    assert list(gather_groups(model)) == layers + ([] if tied else [model.get_input_embeddings()])


def test_an_expert_inside_a_layer_is_no_repeated_layer() -> None:
    layers = nn.ModuleList(nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2)] * 2)}) for _ in range(3))
    assert list(repeated_layers(nn.ModuleDict({"layers": layers}))) == list(layers)
