"""The laws of the arithmetic, over every method and every kind of layer."""

import hashlib
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lorakit.errors import TargetError
from lorakit.lora import adapter_tensors, inject
from lorakit.lora.layer_kinds import CONV1D, LINEAR, LayerKind
from lorakit.lora.merge_weight import LowRankUpdate, merged_weight, rounded_once
from lorakit.lora.methods import METHODS
from tests.helpers.rounding import nearest


class Two(nn.Module):
    """One layer of each kind, and a head without an adapter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(12, 20)
        self.conv = Conv1D(8, 20)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(torch.tanh(self.conv(torch.tanh(self.first(x)))))


def adapted(method: str, **settings: Any) -> Two:
    model = Two()
    inject(model, method=method, rank=4, alpha=8, targets=["first", "conv"], **settings)
    return model


def randomised(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    for tensor in adapter_tensors(model).values():
        tensor.data.normal_(std=0.3)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("init", ["gaussian", "kaiming"])
@pytest.mark.parametrize("method", METHODS)
def test_an_untrained_adapter_changes_nothing(method: str, init: str, dtype: torch.dtype) -> None:
    x = torch.randn(5, 7, 12, dtype=dtype)
    expected = Two().to(dtype)(x)
    model = Two().to(dtype)

    inject(model, method=method, rank=4, targets=["first", "conv"], init=init)

    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("kind", [LINEAR, CONV1D], ids=lambda kind: kind.name)
@pytest.mark.parametrize("method", METHODS)
def test_merging_gives_the_adapted_output(method: str, kind: LayerKind) -> None:
    name = "first" if kind is LINEAR else "conv"
    layer = randomised(adapted(method)).get_submodule(name)
    x = torch.randn(9, layer.in_features)
    W = layer.weight.T if kind.stored_axis == "in" else layer.weight

    merged = METHODS[method].merge(W.detach().double(), layer.tensors(), layer.scale).float()

    product = kind.product(x, merged.T if kind.stored_axis == "in" else merged, layer.bias)
    torch.testing.assert_close(product, layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [LINEAR, CONV1D], ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_a_merged_weight_is_the_float64_sum_rounded_once(method: str, dtype: torch.dtype, kind: LayerKind) -> None:
    torch.manual_seed(0)
    W = torch.randn(1500, 800).to(dtype)  # more than one block of rows
    updates, exact = [], W.double()
    for rank in (8, 3):
        tensors = {"lora_A": torch.randn(rank, 800), "lora_B": torch.randn(1500, rank)}
        if "lora_magnitude_vector" in METHODS[method].tensors:
            tensors["lora_magnitude_vector"] = torch.rand(1500)
        s = METHODS[method].scale(3.0, rank)
        updates.append(LowRankUpdate(method, s, tensors))
        V = W.double() + s * (tensors["lora_B"].double() @ tensors["lora_A"].double())
        if "dora" in method:  # each on the base's own weight, not on one another's
            V = tensors["lora_magnitude_vector"].double()[:, None] * V / V.norm(dim=1, keepdim=True)
        exact = exact + (V - W.double())

    stored = W.T.contiguous() if kind.stored_axis == "in" else W
    merged = merged_weight(stored, kind, [updates], dtype)

    assert merged.dtype == dtype
    assert ((merged.T if kind.stored_axis == "in" else merged) != nearest(exact, dtype)).float().mean() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounding_is_to_the_nearest_and_happens_once(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    values = torch.randn(300_000, generator=g, dtype=torch.float64) * 10.0 ** torch.randint(
        -9, 4, (300_000,), generator=g
    )
    half = (
        values.to(dtype).double() + torch.nextafter(values.float().to(dtype), torch.tensor(9e4, dtype=dtype)).double()
    ) / 2
    for exact in (values, half, half * (1 + 2.0**-40), half * (1 - 2.0**-40), torch.zeros(3, dtype=torch.float64)):
        assert torch.equal(rounded_once(exact.clone(), dtype), nearest(exact, dtype))
    assert rounded_once(torch.tensor([1 + 2**-8 + 2**-40], dtype=torch.float64), torch.bfloat16) == 1.0078125


@pytest.mark.parametrize("method", METHODS)
def test_only_adapter_tensors_are_trained_and_the_base_is_never_written(method: str) -> None:
    model = adapted(method)
    base = {name: p for name, p in model.named_parameters() if name not in adapter_tensors(model)}
    before = {name: hashlib.sha256(p.detach().numpy().tobytes()).hexdigest() for name, p in base.items()}
    optimizer = torch.optim.AdamW(adapter_tensors(model).values(), lr=0.1, weight_decay=0.1)

    for _ in range(3):
        model(torch.randn(4, 12)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert {p.requires_grad for p in base.values()} == {False}
    assert all(p.grad is None for p in base.values())
    after = {name: hashlib.sha256(p.detach().numpy().tobytes()).hexdigest() for name, p in base.items()}
    assert after == before
    assert all(t.abs().sum() > 0 for name, t in adapter_tensors(model).items() if name.endswith("lora_B"))


@pytest.mark.parametrize("init", ["gaussian", "kaiming"])
def test_a_starts_as_the_literature_says(init: str) -> None:
    model = nn.Sequential(nn.Linear(4096, 16))
    inject(model, rank=32, targets=["0"], init=init)
    A, B = adapter_tensors(model)["0.lora_A"], adapter_tensors(model)["0.lora_B"]

    expected = 1 / 32 if init == "gaussian" else (1 / 4096) ** 0.5 / 3**0.5
    assert A.std().item() == pytest.approx(expected, rel=0.02)
    assert A.dtype == torch.float32
    assert not B.any()


def test_the_start_depends_on_seed_and_name_alone() -> None:
    one, same, other = adapted("lora", seed=3), adapted("lora", seed=3), adapted("lora", seed=4)
    alone = Two()
    inject(alone, rank=4, targets=["conv"], seed=3)

    A = {key: adapter_tensors(m)["conv.lora_A"] for key, m in zip("sxoa", (one, same, other, alone), strict=True)}

    assert torch.equal(A["s"], A["x"])
    assert torch.equal(A["s"], A["a"])
    assert not torch.equal(A["s"], A["o"])


def test_a_layer_used_twice_gets_one_adapter() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), shared)

    inject(model, rank=2, targets=["0"])

    assert model[0] is model[2]
    assert len(adapter_tensors(model)) == 2


def test_a_second_adapter_and_bad_numbers_are_refused() -> None:
    with pytest.raises(TargetError, match="has an adapter already"):
        inject(adapted("lora"), targets=["head"])
    for settings in (
        {"rank": 2.5},
        {"init": "foo"},
        {"targets": "f("},
        {"rank_pattern": {"head": 0}},
        {"alpha_pattern": {"head": -3.0}},
    ):
        model = Two()
        with pytest.raises(TargetError):
            inject(model, **({"targets": ["head"]} | settings))
        assert all(parameter.requires_grad for parameter in model.parameters())
    for settings in ({"rank": 0}, {"alpha": 0.0}, {"dropout": 1.0}, {"method": "dorra"}):
        with pytest.raises(TargetError):
            inject(Two(), targets=["head"], **settings)
