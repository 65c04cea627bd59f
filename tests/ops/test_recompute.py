"""Inputs recomputed in backward instead of saved: the same bits, the same gradients, fewer bytes."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lorakit.base.layers import checkpoint_layers
from lorakit.lora import LoraLinear, adapter_tensors, inject
from lorakit.lora.methods import METHODS
from lorakit.ops.fuse import fuse_model, is_gated_mlp, is_rms_norm
from lorakit.ops.recompute import recomputable, with_gradient
from tests.helpers.memory_counter import Alive
from tests.helpers.models import ARCHITECTURES, SMALL, build

IDS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))


def bytes_saved(model: nn.Module) -> int:
    """Return the bytes alive after forward, while its output is there for backward."""
    with Alive() as alive:
        _waits = model(input_ids=IDS, use_cache=False)
        return alive.bytes


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    logits = model(input_ids=IDS, use_cache=False).logits.float()
    (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    return [tensor.grad.clone() for tensor in adapter_tensors(model).values() if tensor.grad is not None]


def plain_forward(layer: LoraLinear, x: torch.Tensor) -> torch.Tensor:
    return METHODS[layer.method].apply(layer.inputs(x), layer.tensors(), layer.scale)


def without_fusing(model: nn.Module) -> nn.Module:
    """Undo all fusing of a model, so that it saves all that autograd saves."""
    for module in model.modules():
        if hasattr(type(module), "fused_kind"):
            module.__class__ = type(module).__bases__[0]
        if isinstance(module, LoraLinear):
            module.forward = partial(plain_forward, module)  # type: ignore[method-assign]
    return model


def adapted(architecture: str, dtype: torch.dtype) -> nn.Module:
    model = inject(build(architecture).to(dtype), rank=3).train()
    fuse_model(model)
    for number, tensor in enumerate(adapter_tensors(model).values()):
        tensor.data.normal_(std=0.05, generator=torch.Generator().manual_seed(number))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "architecture", ["llama", "qwen3", "mistral", "gemma3_text", "phi3", "gpt_neox", "mixtral", "olmo2"]
)
def test_gradients_are_those_of_a_model_that_saves_everything(architecture: str, dtype: torch.dtype) -> None:
    model = adapted(architecture, dtype)
    result, expected = (
        torch.cat([gradient.flatten() for gradient in gradients(each)])
        for each in (model, without_fusing(copy.deepcopy(model)))
    )
    assert (result - expected).norm() <= (1e-5 if dtype is torch.float32 else 5e-2) * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text"])
def test_fewer_bytes_are_saved(architecture: str, dtype: torch.dtype) -> None:
    model = adapted(architecture, dtype)
    values, layers = IDS.numel() * dtype.itemsize, 2
    of_a_gate, of_a_norm = 2 * SMALL["intermediate_size"], SMALL["hidden_size"]

    fewer = bytes_saved(without_fusing(copy.deepcopy(model))) - bytes_saved(model)

    norms = 2 * layers - 1  # the first norm reads an embedding, for which autograd saves nothing
    assert fewer >= values * (layers * of_a_gate + norms * of_a_norm)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_activation_checkpointing_gives_the_same_gradients(architecture: str) -> None:
    model = adapted(architecture, torch.float32)
    expected = gradients(model)
    checkpoint_layers(model)
    for one, other in zip(gradients(model), expected, strict=True):
        assert torch.equal(one, other)


def products(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    x, u = (torch.randn(3, 8, generator=torch.Generator().manual_seed(n)).to(dtype).requires_grad_() for n in (0, 1))
    w = torch.rand(8).to(dtype)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return {
        "both trainable": F.silu(x) * u, "one is frozen": (x * u) * w, "frozen first": w * (x * u), "a number": (x * u) * 2.0,
        "norm": w * normed.to(dtype), "norm, rounded last": (normed * (1 + w.float())).type_as(x),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", list(products(torch.float32)))
def test_a_product_is_recomputed_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    x = products(dtype)[kind]
    recomputed = recomputable(x)
    assert recomputed is not None
    assert recomputed.get().dtype == dtype
    assert torch.equal(recomputed.get(), x)


def test_a_value_whose_factors_were_not_saved_is_not_recomputed() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    frozen = torch.rand(8)
    for tensor in (x, x + 1, F.silu(x), frozen * x, torch.rand(8), F.dropout(x, 0.1) * frozen):
        assert recomputable(tensor) is None


def test_only_an_mlp_with_exactly_that_code_is_fused() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(4, 4) for _ in range(3))
            self.act_fn: nn.Module = nn.SiLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 2)

    class Same(Other):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    trainable_activation = Same()
    trainable_activation.act_fn = nn.PReLU()
    assert [is_gated_mlp(module) for module in (Other(), Same(), trainable_activation)] == [False, True, False]


def test_an_activation_that_returns_its_input_is_not_overwritten() -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(4, 4) for _ in range(3))
            self.act_fn = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    plain = Mlp()
    model = inject(nn.Sequential(copy.deepcopy(plain)), rank=2)
    assert fuse_model(model).parts["mlp"].fused == 1
    x = torch.randn(3, 4, requires_grad=True)
    (result,), (expected,) = (torch.autograd.grad(each(x).sum(), x) for each in (model, plain))
    assert is_gated_mlp(plain)
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in ("bert", "t5")])
def test_outputs_are_the_same_bits(architecture: str) -> None:
    base = build(architecture)
    expected = base(input_ids=IDS).logits
    model = inject(copy.deepcopy(base), rank=2)
    fuse_model(model)
    assert torch.equal(model(input_ids=IDS).logits, expected)


def test_most_models_have_parts_that_can_be_fused() -> None:
    layers, of_attention = SMALL["num_hidden_layers"], {"qwen3": 2, "olmo2": 2}
    own_norms = ("gemma", "gemma2", "gemma3_text")
    names = ("llama", "qwen2", "qwen3", "mistral", "olmo2", "granite", "smollm3", *own_norms)
    for name in names:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **(SMALL | {"head_dim": 8})))
        assert sum(map(is_gated_mlp, model.modules())) == layers, name
        norms = 0 if name in own_norms else 1 + layers * (2 + of_attention.get(name, 0))
        assert sum(map(is_rms_norm, model.modules())) == norms, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "olmo2"])
def test_a_norm_has_the_same_bits_saves_only_its_input_and_can_be_trained(
    architecture: str, dtype: torch.dtype
) -> None:
    model = adapted(architecture, dtype)
    norm = next(module for module in model.modules() if "RMSNorm" in type(module).__name__)
    plain = without_fusing(copy.deepcopy(model)).get_submodule(next(n for n, m in model.named_modules() if m is norm))
    norm.weight.data.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(3))
    plain.load_state_dict(norm.state_dict())
    x = torch.randn(5, norm.weight.numel(), generator=torch.Generator().manual_seed(4)).to(dtype).requires_grad_()
    with Alive() as alive:
        y = norm(x)
        alive_bytes = alive.bytes
    assert torch.equal(y, plain(x))
    assert alive_bytes == y.nbytes + 5 * 4  # its output, and a number per token
    outer = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    (result,), (expected,) = (torch.autograd.grad(y, x, outer) for y in (norm(x), plain(x)))
    assert (result - expected).norm() <= (1e-6 if dtype is torch.float32 else 1e-2) * expected.norm()

    norm.weight.requires_grad_()
    norm(x).sum().backward()
    assert norm.weight.grad is not None


def test_an_input_is_recomputed_behind_a_function_that_changes_its_gradient_alone() -> None:
    factors = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
    x = factors[0] * factors[1]
    behind = with_gradient(x, lambda gradient: 2 * gradient)
    recomputed = recomputable(behind)
    assert recomputed is not None
    assert recomputed is recomputable(x)
    assert torch.equal(recomputed.get(), x)
    behind.sum().backward()
    assert torch.equal(factors[0].grad, 2 * factors[1])
