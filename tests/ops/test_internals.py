"""Every private name of torch, transformers and DeepSpeed behind ops/_internals.py still exists and does its work."""

import importlib
import inspect
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from lorakit.ops import _internals
from tests.helpers.models import build, build_variant


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_of_one_storage_have_one_id_and_others_have_not(device: str) -> None:
    one, other = torch.empty(4, 4, device=device), torch.empty(4, 4, device=device)

    assert _internals.storage_id(one) == _internals.storage_id(one.view(16)[3:])
    assert _internals.storage_id(one) != _internals.storage_id(other)


def test_the_innermost_hooks_for_saved_tensors_are_read() -> None:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    assert _internals.saved_tensor_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert _internals.saved_tensor_hooks() == (pack, unpack)
    assert _internals.saved_tensor_hooks() is None


def test_activation_checkpointing_is_detected_by_its_hooks() -> None:
    inside: list[bool] = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        inside.append(_internals.saved_tensor_hooks() is not None)
        return x * 2

    checkpoint(layer, torch.ones(2, requires_grad=True), use_reentrant=False)

    assert inside == [True]


def test_the_node_of_a_product_has_each_factor_that_the_other_ones_gradient_needs() -> None:
    a, b, frozen = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True), torch.rand(3)
    both, left, right = (a * b).grad_fn, (frozen * b).grad_fn, (a * frozen).grad_fn
    assert both is not None

    assert both.name() == "MulBackward0"
    assert torch.equal(_internals.saved_factor(both, "self"), a)  # type: ignore[arg-type]
    assert torch.equal(_internals.saved_factor(both, "other"), b)  # type: ignore[arg-type]
    assert torch.equal(_internals.saved_factor(left, "self"), frozen)  # type: ignore[arg-type]
    assert _internals.saved_factor(left, "other") is None
    assert _internals.saved_factor(right, "self") is None


def test_a_models_attention_is_read_and_can_be_set() -> None:
    model = build("llama")

    assert _internals.attention_implementation(model) == "sdpa"
    model.set_attn_implementation("eager")
    assert _internals.attention_implementation(model) == "eager"
    assert _internals.can_set_attention(model)
    assert not _internals.can_set_attention(nn.Linear(2, 2))


def test_a_buffer_that_is_not_saved_is_distinguished_from_one_that_is() -> None:
    module = nn.Module()
    module.register_buffer("saved", torch.zeros(1))
    module.register_buffer("derived", torch.zeros(1), persistent=False)

    assert _internals.is_persistent_buffer(module, "saved")
    assert not _internals.is_persistent_buffer(module, "derived")


def test_forward_hooks_of_every_form_are_removed() -> None:
    module, calls = nn.Linear(2, 2), []
    module.register_forward_hook(lambda *arguments: calls.append("plain"))
    module.register_forward_hook(lambda *arguments: calls.append("with keywords"), with_kwargs=True)

    _internals.remove_forward_hooks(module)
    module(torch.zeros(1, 2))

    assert calls == []


def test_forward_pre_hooks_of_a_class_are_removed() -> None:
    class Hook:
        def __call__(self, *arguments: object) -> None:
            calls.append("class")

    module, calls = nn.Linear(2, 2), []
    module.register_forward_pre_hook(Hook(), with_kwargs=True)
    module.register_forward_pre_hook(lambda *arguments: calls.append("other"))

    _internals.remove_forward_hooks(module, Hook)
    module(torch.zeros(1, 2))

    assert calls == ["other"]


@pytest.mark.filterwarnings("ignore")
def test_deepspeed_still_has_the_nodes_that_change_no_value() -> None:
    pytest.importorskip("deepspeed")
    source = inspect.getsource(importlib.import_module("deepspeed.runtime.zero.parameter_offload"))

    for name in _internals.DEEPSPEED_NODES:
        assert f"class {name.removesuffix('Backward')}(torch.autograd.Function)" in source


def test_experts_in_memory_are_split_as_save_pretrained_splits_them(tmp_path: Path) -> None:
    model = build_variant("mixtral")
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    experts = dict(model.model.layers[0].mlp.experts.named_parameters(prefix="model.layers.0.mlp.experts"))

    saved = _internals.as_saved(model, experts)

    assert len(saved) == 3 * model.config.num_local_experts
    assert all(torch.equal(tensor, stored[name]) for name, tensor in saved.items())


def test_a_plain_parameter_is_none_of_zero3() -> None:
    assert not _internals.is_zero3_parameter(nn.Parameter(torch.ones(2, 3)))


def test_transformers_compiles_chat_templates_in_the_sandbox_that_is_set() -> None:
    from transformers.utils import chat_template_utils as compiler

    from lorakit.data.template_limits import LimitedSandbox

    _internals.set_template_sandbox(LimitedSandbox)
    assert isinstance(compiler._compile_jinja_template("{{ 1 }}").environment, LimitedSandbox)
