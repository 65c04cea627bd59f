"""An untrained adapter is compared with the base, and one without linear layers is an adapter like others."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import lorakit
from lorakit.errors import PatchError, TargetError
from lorakit.lora import adapter_modules
from lorakit.lora.methods import METHODS
from lorakit.lora.untrained import check_untrained, relative_difference
from lorakit.ops.lora_linear import lora_linear
from tests.helpers.models import build, build_variant, outputs

IDS = torch.arange(3, 27).reshape(2, 12)


class Scaled(nn.Embedding):
    """An embedding with a forward of its own."""

    def forward(self, ids: Tensor) -> Tensor:
        return 3 * super().forward(ids)


class ScaledAsGemma(Scaled):
    """An embedding that looks like Gemma's and computes something else."""

    embed_scale = 1.0


def with_embedding(kind: type[nn.Embedding]) -> Any:
    model = build("llama")
    old = model.get_input_embeddings()
    embedding = kind(old.num_embeddings, old.embedding_dim)
    embedding.weight = old.weight
    model.set_input_embeddings(embedding)
    return model


def test_token_rows_are_refused_on_an_embedding_with_a_forward_of_its_own() -> None:
    with pytest.raises(TargetError, match="Scaled, whose forward is not that of an nn.Embedding"):
        lorakit.inject(with_embedding(Scaled), trainable_tokens=[5], targets=["q_proj"])


@pytest.mark.parametrize("settings", [{"trainable_tokens": [5]}, {"targets": ["embed_tokens"]}], ids=str)
def test_an_untrained_adapter_that_changes_a_layer_is_refused_and_leaves_the_model(settings: dict[str, Any]) -> None:
    model = with_embedding(ScaledAsGemma)
    expected = outputs(model, "llama")

    with pytest.raises(TargetError, match=r"embed_tokens is a ScaledAsGemma, .* changes its output by"):
        lorakit.inject(model, **settings)

    assert not list(adapter_modules(model))
    assert torch.equal(outputs(model, "llama"), expected)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("init", ["gaussian", "pissa", "olora"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_start_passes_and_the_modes_of_modules_stay(init: str, dtype: torch.dtype) -> None:
    model = build("llama").to(dtype).train()
    model.model.norm.eval()

    lorakit.inject(model, init=init, dropout=0.5, rank=2)

    assert check_untrained(model)
    assert model.training
    assert not model.model.norm.training


@pytest.mark.parametrize("base_name", ["llama", "llama_tied"])
def test_a_head_with_logits_of_new_tokens_passes(base_name: str) -> None:
    model = lorakit.inject(build_variant(base_name), new_tokens={"so so": 64, "say": 65}, targets=["q_proj"])
    assert check_untrained(model)


def test_a_model_that_is_not_called_with_token_ids_alone_is_not_compared() -> None:
    assert not check_untrained(lorakit.inject(nn.Sequential(nn.Linear(4, 4))))
    assert not check_untrained(lorakit.inject(build("t5"), targets=["q"]))


@pytest.mark.parametrize(
    "settings", [{"targets": [], "trainable_tokens": [5, 9]}, {"targets": [], "modules_to_save": ["lm_head"]}], ids=str
)
def test_an_adapter_without_linear_layers_is_saved_loaded_merged_and_read_by_peft(
    settings: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    from peft import PeftModel

    def live() -> Any:
        return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()

    model = lorakit.inject(live(), **settings)
    for tensor in lorakit.adapter_tensors(model).values():
        tensor.data.normal_()
    expected = model(IDS).logits
    patch = lorakit.save_patch(model, tmp_path / "patch")

    assert torch.equal(lorakit.load_patch(live(), patch)(IDS).logits, expected)
    torch.testing.assert_close(PeftModel.from_pretrained(live(), patch)(IDS).logits, expected)
    served = lorakit.load(base, {"one": patch}, dtype="float32")
    torch.testing.assert_close(served(IDS, adapters="one").logits, expected)
    lorakit.merge(base, patch, out=tmp_path / "merged")
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(IDS).logits, expected)
    other = live()
    for parameter in other.parameters():
        parameter.data.mul_(1.5)
    with pytest.raises(PatchError, match="trained on another base"):
        lorakit.load_patch(other, patch)


@pytest.mark.parametrize("base_name", ["mixtral", "gpt_oss"])
def test_a_patch_of_experts_goes_onto_no_other_experts(base_name: str, tmp_path: Path, tokenizer: Any) -> None:
    """In memory and from files, whether the files hold the experts of a layer in one tensor or one by one."""
    model = build_variant(base_name)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    lorakit.inject(model, targets=[], target_parameters="all-experts", rank=2)
    patch = lorakit.save_patch(model, tmp_path / "patch")
    assert lorakit.load(tmp_path / "base", {"one": patch}, dtype="float32")

    other = build_variant(base_name)
    for parameter in other.parameters():
        if parameter.dim() == 3:
            parameter.data.mul_(1.5)
    other.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")

    with pytest.raises(PatchError, match=r"trained on another base .* adapted weights .* differ"):
        lorakit.load_patch(other, patch)
    with pytest.raises(PatchError, match=r"trained on another base .* adapted weights"):
        lorakit.load(tmp_path / "other", {"one": patch}, dtype="float32")


def test_dropout_on_the_layers_of_listed_experts_is_refused_by_name() -> None:
    model = nn.ModuleDict({"experts": nn.ModuleList([nn.ModuleDict({"up": nn.Linear(4, 4)})])})
    with pytest.raises(TargetError, match=r"adapter.dropout: experts.0.up is a layer of an expert"):
        lorakit.inject(model, dropout=0.1)
    lorakit.inject(model)


@pytest.mark.parametrize("method", METHODS)
def test_x_is_saved_for_backward_only_where_a_is_trained(method: str) -> None:
    x = torch.randn(50, 12, requires_grad=True)
    W = torch.randn(8, 12)
    A = torch.randn(2, 12, requires_grad=METHODS[method].tensors["lora_A"].trainable)
    B = torch.randn(8, 2, requires_grad=True)
    saved: list[int] = []

    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):  # type: ignore[func-returns-value]
        y = lora_linear(x, lambda: W, None, A, B, 1.0)
    y.sum().backward()

    assert (x.numel() in saved) == A.requires_grad
    assert x.grad is not None


def test_outputs_that_are_no_numbers_differ_by_infinity() -> None:
    wrong = torch.tensor([1.0, math.nan])
    assert relative_difference(wrong, torch.ones(2)) == relative_difference(torch.ones(2), wrong) == math.inf
