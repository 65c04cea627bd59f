"""What is made again in backward instead of being kept: the same bits, the same gradients, fewer bytes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lorakit.base.layers import checkpoint_layers
from lorakit.lora import adapter_tensors, inject
from lorakit.ops.gated_mlp import is_gated_mlp
from lorakit.ops.recompute import recomputable
from lorakit.ops.rms_norm import is_rms_norm
from lorakit.ops.rope import is_rotary
from tests.helpers.memory_counter import Alive
from tests.helpers.models import ARCHITECTURES, SMALL, build

IDS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))


def bytes_kept(model: nn.Module) -> int:
    """What is alive when forward has ended and its output waits for backward."""
    with Alive() as alive:
        _waits = model(input_ids=IDS, use_cache=False)
        return alive.bytes


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    logits = model(input_ids=IDS, use_cache=False).logits.float()
    (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    return [tensor.grad.clone() for tensor in adapter_tensors(model).values() if tensor.grad is not None]


def plainly(model: nn.Module) -> nn.Module:
    """The same model, keeping all that autograd keeps."""
    for module in model.modules():
        vars(module).pop("forward", None)
        if hasattr(module, "fused"):
            module.fused = False
    return model


def adapted(architecture: str, dtype: torch.dtype) -> nn.Module:
    model = inject(build(architecture).to(dtype), rank=3).train()
    for number, tensor in enumerate(adapter_tensors(model).values()):
        tensor.data.normal_(std=0.05, generator=torch.Generator().manual_seed(number))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "architecture", ["llama", "qwen3", "mistral", "gemma3_text", "phi3", "gpt_neox", "mixtral", "olmo2"]
)
def test_gradients_are_those_of_a_model_that_keeps_everything(architecture: str, dtype: torch.dtype) -> None:
    model = adapted(architecture, dtype)
    found, expected = (
        torch.cat([gradient.flatten() for gradient in gradients(each)])
        for each in (model, plainly(copy.deepcopy(model)))
    )
    assert (found - expected).norm() <= (1e-5 if dtype is torch.float32 else 5e-2) * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text"])
def test_less_is_kept(architecture: str, dtype: torch.dtype) -> None:
    model = adapted(architecture, dtype)
    values, layers = IDS.numel() * dtype.itemsize, 2
    of_a_gate, of_a_norm = 2 * SMALL["intermediate_size"], SMALL["hidden_size"]

    less = bytes_kept(plainly(copy.deepcopy(model))) - bytes_kept(model)

    norms = 2 * layers - 1  # the first reads an embedding, of which nothing is kept
    assert less >= values * (layers * of_a_gate + norms * of_a_norm)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_layers_that_are_computed_again_compute_the_same(architecture: str) -> None:
    model = adapted(architecture, torch.float32)
    expected = gradients(model)
    checkpoint_layers(model)
    for one, other in zip(gradients(model), expected, strict=True):
        assert torch.equal(one, other)


def makers(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    x, u = (torch.randn(3, 8, generator=torch.Generator().manual_seed(n)).to(dtype).requires_grad_() for n in (0, 1))
    w = torch.rand(8).to(dtype)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return {
        "both learn": F.silu(x) * u, "one is fixed": (x * u) * w, "fixed first": w * (x * u), "a number": (x * u) * 2.0,
        "norm": w * normed.to(dtype), "norm, rounded last": (normed * (1 + w.float())).type_as(x),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", list(makers(torch.float32)))
def test_a_product_is_made_again_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    x = makers(dtype)[kind]
    again = recomputable(x)
    assert again is not None
    assert again.get().dtype == dtype
    assert torch.equal(again.get(), x)


def test_what_keeps_too_little_is_not_made_again() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    fixed = torch.rand(8)
    for kept in (x, x + 1, F.silu(x), fixed * x, torch.rand(8), F.dropout(x, 0.1) * fixed):
        assert recomputable(kept) is None


def test_only_an_mlp_with_that_very_code_is_changed() -> None:
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

    learns = Same()
    learns.act_fn = nn.PReLU()
    assert [is_gated_mlp(module) for module in (Other(), Same(), learns)] == [False, True, False]


def test_an_activation_that_gives_its_input_back_is_not_overwritten() -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(4, 4) for _ in range(3))
            self.act_fn = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    plain = Mlp()
    model = inject(nn.Sequential(copy.deepcopy(plain)), rank=2)
    x = torch.randn(3, 4, requires_grad=True)
    (found,), (expected,) = (torch.autograd.grad(each(x).sum(), x) for each in (model, plain))
    assert is_gated_mlp(plain)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in ("bert", "t5")])
def test_outputs_are_the_same_bits(architecture: str) -> None:
    base = build(architecture)
    expected = base(input_ids=IDS).logits
    model = inject(copy.deepcopy(base), rank=2)
    assert torch.equal(model(input_ids=IDS).logits, expected)


def test_most_models_have_such_parts() -> None:
    layers, of_attention = SMALL["num_hidden_layers"], {"qwen3": 2, "olmo2": 2}
    own_norms = ("gemma", "gemma2", "gemma3_text")
    names = ("llama", "qwen2", "qwen3", "mistral", "olmo2", "granite", "smollm3", *own_norms)
    for name in names:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **(SMALL | {"head_dim": 8})))
        assert sum(map(is_gated_mlp, model.modules())) == layers, name
        norms = 0 if name in own_norms else 1 + layers * (2 + of_attention.get(name, 0))
        assert sum(map(is_rms_norm, model.modules())) == norms, name
        assert sum(map(is_rotary, model.modules())) == (0 if name == "olmo2" else layers), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "olmo2"])
def test_a_norm_is_the_same_bits_keeps_its_input_alone_and_learns_as_before(
    architecture: str, dtype: torch.dtype
) -> None:
    model = adapted(architecture, dtype)
    norm = next(module for module in model.modules() if "RMSNorm" in type(module).__name__)
    plain = plainly(copy.deepcopy(model)).get_submodule(next(n for n, m in model.named_modules() if m is norm))
    norm.weight.data.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(3))
    plain.load_state_dict(norm.state_dict())
    x = torch.randn(5, norm.weight.numel(), generator=torch.Generator().manual_seed(4)).to(dtype).requires_grad_()
    with Alive() as alive:
        y = norm(x)
        kept = alive.bytes
    assert torch.equal(y, plain(x))
    assert kept == y.nbytes + 5 * 4  # its output, and a number per token
    outer = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    (found,), (expected,) = (torch.autograd.grad(made, x, outer) for made in (norm(x), plain(x)))
    assert (found - expected).norm() <= (1e-6 if dtype is torch.float32 else 1e-2) * expected.norm()

    norm.weight.requires_grad_()
    norm(x).sum().backward()
    assert norm.weight.grad is not None
