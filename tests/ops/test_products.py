"""Products with frozen weights by oneDNN: the same numbers to rounding, and gradients and copies as torch's own."""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorakit.ops import products
from lorakit.ops._internals import has_bfloat16_products, has_onednn_linear
from lorakit.ops.lora_linear import lora_linear
from lorakit.ops.products import onednn_forward, use_products
from lorakit.slots.hooks import copy_with

pytestmark = pytest.mark.skipif(not has_onednn_linear(), reason="this torch is built without oneDNN")
SHAPES = [(48,), (1, 48), (3, 1, 48), (2, 5, 48), (0, 48)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Let small weights be multiplied by oneDNN too, and record the shapes of such products."""
    own = products.onednn_linear
    shapes: list[tuple[int, ...]] = []

    def recording(x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None = None) -> Tensor:
        shapes.append((*x.shape, len(weight)))
        return own(x, weight, bias, added)

    monkeypatch.setattr(products, "MIN_NUMBERS", 0)
    monkeypatch.setattr(products, "onednn_linear", recording)
    return shapes


def layer_by_onednn(*, bias: bool = False) -> nn.Linear:
    layer = nn.Linear(48, 32, bias=bias).requires_grad_(False)
    layer.__dict__["forward"] = partial(onednn_forward, layer)
    return layer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_product_and_gradient_are_the_layers_own_to_rounding(
    calls: list[tuple[int, ...]], bias: bool, shape: tuple[int, ...]
) -> None:
    layer, x = layer_by_onednn(bias=bias), torch.randn(shape, requires_grad=True)

    y = layer(x)
    (dx,) = torch.autograd.grad(y.square().sum(), x)

    own = F.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(y, own)
    torch.testing.assert_close(dx, torch.autograd.grad(own.square().sum(), x)[0])
    assert len(calls) == 2
    y.add_(1)  # as some models do with a layer's output


@pytest.mark.parametrize("shape", SHAPES)
def test_an_adapted_product_is_that_of_torch_to_rounding(calls: list[tuple[int, ...]], shape: tuple[int, ...]) -> None:
    W, b, A, B = torch.randn(32, 48), torch.randn(32), torch.randn(4, 48), torch.randn(32, 4)
    given = torch.randn(shape)
    results = []
    for by_onednn in (False, True):
        inputs = [tensor.clone().requires_grad_() for tensor in (given, A, B)]
        y = lora_linear(inputs[0], lambda: W, b, *inputs[1:], 0.5, by_onednn=by_onednn)
        results.append([y, *torch.autograd.grad(y.square().sum(), inputs)])

    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-4)
    assert len(calls) == 2


def test_a_bias_of_any_layout_is_added(calls: list[tuple[int, ...]]) -> None:
    layer, x = layer_by_onednn(bias=True), torch.randn(3, 48)
    layer.bias = nn.Parameter(torch.randn(64)[::2], requires_grad=False)

    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))


def test_a_model_is_pickled_and_compiled_in_one_graph(calls: list[tuple[int, ...]]) -> None:
    model, x = nn.Sequential(layer_by_onednn(), nn.SiLU()), torch.randn(3, 48, requires_grad=True)

    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))


def test_a_layer_that_is_trained_has_gradients_of_its_weights(calls: list[tuple[int, ...]]) -> None:
    layer, x = layer_by_onednn(bias=True), torch.randn(3, 48)
    layer.requires_grad_()

    layer(x).sum().backward()

    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(32, -1))
    assert calls == []


def test_a_copy_with_another_weight_multiplies_by_its_own(calls: list[tuple[int, ...]]) -> None:
    layer, weight = layer_by_onednn(), torch.randn(32, 48)
    x = torch.randn(3, 48)

    torch.testing.assert_close(copy_with(layer, {"weight": weight})(x), x @ weight.T)
    torch.testing.assert_close(layer(x), x @ layer.weight.T)
    torch.testing.assert_close(copy.deepcopy(layer)(x), layer(x))
    assert len(calls) == 4


def test_what_onednn_does_not_compute_is_torchs_to_the_bit(calls: list[tuple[int, ...]]) -> None:
    layer, x = layer_by_onednn(bias=True), torch.randn(3, 48)

    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="same dtype"):
        layer(x.double().requires_grad_())
    layer.to(torch.bfloat16)
    assert torch.equal(layer(x.bfloat16()), nn.Linear.forward(layer, x.bfloat16()))
    assert calls == []


def test_small_weights_are_multiplied_by_torch() -> None:
    layer, x = layer_by_onednn(bias=True), torch.randn(2, 3, 48, requires_grad=True)

    y = layer(x)
    assert torch.equal(y, nn.Linear.forward(layer, x))
    y.add_(1)


@pytest.fixture
def prepacked(calls: list[tuple[int, ...]]) -> nn.Linear:
    layer = nn.Linear(48, 32).requires_grad_(False)
    use_products(layer, "prepacked")
    return layer


@pytest.mark.parametrize("shape", SHAPES)
def test_a_prepacked_product_is_that_of_torch_to_rounding(
    prepacked: nn.Linear, calls: list[tuple[int, ...]], shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape)

    with torch.no_grad():
        y = prepacked(x)
        y.add_(0)  # as some models do with a layer's output

    torch.testing.assert_close(y, F.linear(x, prepacked.weight, prepacked.bias))
    assert y.shape == (*shape[:-1], 32)
    assert len(calls) == 1


@pytest.mark.skipif(not has_bfloat16_products(), reason="this CPU does not multiply bfloat16")
@pytest.mark.parametrize("sizes", [(48, 32), (576, 192), (1536, 576), (300, 100)])
def test_in_bfloat16_a_prepacked_product_is_that_of_torch_to_the_bit(
    calls: list[tuple[int, ...]], sizes: tuple[int, int]
) -> None:
    layer = nn.Linear(*sizes, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(64, sizes[0], dtype=torch.bfloat16)
    own = layer(x)
    use_products(layer, "prepacked")

    with torch.no_grad():  # and a row is the same in any batch of `BatchSizes`
        assert all(torch.equal(layer(x[:height]), own[:height]) for height in range(4, 65, 4))
    assert len(calls) == 16


def test_copies_of_a_weight_are_used_for_it_alone(prepacked: nn.Linear) -> None:
    x, weight = torch.randn(3, 48), torch.randn(32, 48)

    with torch.no_grad():
        own = prepacked(x)
        torch.testing.assert_close(copy_with(prepacked, {"weight": weight})(x), F.linear(x, weight, prepacked.bias))
        torch.testing.assert_close(copy.deepcopy(prepacked)(x), own)
        prepacked.weight.mul_(2)
        torch.testing.assert_close(prepacked(x), F.linear(x, prepacked.weight, prepacked.bias))
        prepacked.weight.data = weight
        torch.testing.assert_close(prepacked(x), F.linear(x, weight, prepacked.bias))
        prepacked.to(torch.float64)
        assert torch.equal(prepacked(x.double()), F.linear(x.double(), weight.double(), prepacked.bias))


def test_a_prepacked_layer_has_gradients(prepacked: nn.Linear) -> None:
    x = torch.randn(3, 48, requires_grad=True)

    prepacked(x).sum().backward()

    torch.testing.assert_close(x.grad, prepacked.weight.sum(0).expand(3, -1))


def test_layers_with_a_forward_of_their_own_stay_as_they_are() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    model = nn.Sequential(nn.Linear(4, 4), Doubled(4, 4), nn.Embedding(4, 4))

    use_products(model, "torch")
    assert not any("forward" in module.__dict__ for module in model)
    use_products(model, "onednn")
    assert ["forward" in module.__dict__ for module in model] == [True, False, False]


@pytest.mark.parametrize("chosen", ["onednn", "prepacked"])
def test_a_forward_that_another_library_gave_a_layer_stays(chosen: products.Products) -> None:
    layer = nn.Linear(4, 4)
    layer.__dict__["forward"] = torch.relu

    use_products(layer, chosen)

    assert layer.__dict__["forward"] is torch.relu
