"""The fused LoRA product against autograd on the formula: values, gradients and saved tensors."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lorakit.lora import LoraLinear, adapter_tensors, inject
from lorakit.lora.methods import METHODS
from lorakit.ops.dropout import DropoutMask, dropout_mask
from lorakit.ops.lora_linear import lora_linear

SIZES = {"T": 24, "in": 16, "out": 12, "r": 4}


def operands(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)

    def random(*shape: int, trainable: bool = False) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_(trainable)

    return {
        "x": random(2, 12, 16, trainable=True), "weight": nn.Parameter(random(12, 16), requires_grad=False),
        "bias": random(12, trainable=True), "A": random(4, 16, trainable=True), "B": random(12, 4, trainable=True), "s": 0.7,
    }  # fmt: skip


def formula(x: Any, weight: Any, bias: Any, A: Any, B: Any, s: float, mask: DropoutMask | None) -> torch.Tensor:
    dropped = x if mask is None else x * mask.apply(torch.ones_like(x))
    return F.linear(x, weight, bias) + s * F.linear(F.linear(dropped, A), B)


def product(weight: torch.Tensor, **rest: Any) -> torch.Tensor:
    return lora_linear(weight=lambda: weight, **rest)


def trainable_tensors(tensors: dict[str, Any]) -> list[torch.Tensor]:
    return [tensors[name] for name in ("x", "bias", "A", "B") if tensors[name] is not None]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("transposed", [False, True], ids=["linear", "conv1d"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_values_and_gradients_are_those_of_the_formula(dropout: float, transposed: bool, with_bias: bool) -> None:
    given = operands()
    if not with_bias:
        given["bias"] = None
    mask = dropout_mask(given["x"], dropout, "layer") if dropout else None
    expected = formula(**given, mask=mask)
    weights = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * weights).sum(), trainable_tensors(given))

    if transposed:
        given["weight"] = nn.Parameter(given["weight"].T.contiguous().T, requires_grad=False)  # as Conv1D stores it
    y = product(**given, mask=mask)

    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    for a, b in zip(torch.autograd.grad((y * weights).sum(), trainable_tensors(given)), gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", ["x", "A", "B"])
def test_a_frozen_tensor_gets_no_gradient_and_the_rest_get_the_same(frozen: str) -> None:
    given = operands()
    every = dict(zip(("x", "bias", "A", "B"), torch.autograd.grad(
        product(**given).square().sum(), trainable_tensors(given)), strict=True))  # fmt: skip
    given[frozen].requires_grad_(False)
    product(**given).square().sum().backward()
    assert given[frozen].grad is None
    for name in {"x", "bias", "A", "B"} - {frozen}:
        assert torch.equal(given[name].grad, every[name])


def test_float32_masters_on_16_bit_weights_get_float32_gradients() -> None:
    given, exact = operands(torch.bfloat16), operands()
    weights = torch.randn(2, 12, 12)
    for name in ("A", "B"):
        given[name] = given[name].detach().float().requires_grad_()
    (product(**given).float() * weights).sum().backward()
    (product(**exact) * weights).sum().backward()
    for name in ("A", "B"):
        assert given[name].grad.dtype is torch.float32
        assert (given[name].grad - exact[name].grad).norm() < 0.02 * exact[name].grad.norm()


def test_forward_saves_x_and_the_small_product_and_nothing_of_the_size_of_y() -> None:
    given = operands()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        product(**given, mask=dropout_mask(given["x"], 0.5, "layer"))
    assert sorted(t.numel() for t in saved) == sorted([24 * 16, 24 * 4, 4 * 16, 12 * 4])
    assert any(t.data_ptr() == given["x"].data_ptr() for t in saved)


def test_a_frozen_A_needs_no_x_so_none_is_saved() -> None:
    """As in LoRA-FA, whose advantage this is."""
    given = operands()
    given["A"].requires_grad_(False)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        product(**given).sum().backward()
    assert sorted(t.numel() for t in saved) == sorted([24 * 4, 4 * 16, 12 * 4])


def test_layers_that_read_the_same_x_save_it_once() -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(16, 16, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.q(x) + self.k(x) + self.v(x)

    model = inject(Three(), rank=2)
    x, saved = torch.randn(5, 16), set()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.add(t.data_ptr()), t)[1], lambda t: t):
        model(x)
    assert len(saved) == 1 + 3 * 3  # x, and A, B and the small product of each


def test_autocast_is_left_to_torch() -> None:
    model = inject(nn.Sequential(nn.Linear(8, 8)), rank=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(torch.randn(3, 8))
    assert y.dtype is torch.bfloat16
    y.float().sum().backward()
    assert all(tensor.grad is not None for tensor in adapter_tensors(model).values())


@pytest.mark.parametrize(("settings", "fused"), [
    ({}, True), ({"method": "rslora"}, True), ({"method": "lora_fa"}, True), ({"dropout": 0.1}, True),
    ({"method": "dora"}, False), ({"init": "pissa"}, False),
])  # fmt: skip
def test_methods_that_are_more_than_a_low_rank_product_are_not_fused(settings: dict[str, Any], fused: bool) -> None:
    model = inject(nn.Sequential(nn.Linear(8, 8)), rank=2, **settings)
    layer = model[0]
    assert isinstance(layer, LoraLinear)
    assert ("LoraLinearFunction" in type(layer(torch.randn(3, 8)).grad_fn).__name__) == fused


def test_torch_compiles_it_without_a_break() -> None:
    model = inject(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), rank=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        explained = torch._dynamo.explain(model)(torch.randn(3, 8))
    assert explained.graph_break_count == 0


@pytest.mark.parametrize("method", [name for name, row in METHODS.items() if row.fused is not None])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_fused_form_of_a_method_is_its_formula(method: str, dtype: torch.dtype) -> None:
    model = inject(nn.Sequential(nn.Linear(16, 12, bias=False)), rank=4, method=method, init="kaiming")
    layer = model[0]
    assert isinstance(layer, LoraLinear)
    for number, tensor in enumerate(layer.adapter_tensors().values()):
        tensor.data.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)), alpha=0.3)
    model.to(dtype)
    x = torch.randn(7, 16, generator=torch.Generator().manual_seed(9)).to(dtype).requires_grad_()
    trained = [x, *layer.adapter_tensors().values()]
    weights = torch.randn(7, 12, generator=torch.Generator().manual_seed(8)).to(dtype)
    fused, row = layer(x), METHODS[method]
    plain = row.apply(layer.inputs(x), layer.tensors(), layer.scale)

    assert "LoraLinearFunction" in type(fused.grad_fn).__name__
    limit = 1e-6 if dtype is torch.float64 else 2e-2
    results = [
        (fused, plain),
        *zip(*(torch.autograd.grad((y * weights).sum(), trained) for y in (fused, plain)), strict=True),
    ]
    for one, other in results:
        assert (one - other).norm() <= limit * other.norm()
