"""Linear layers by oneDNN's product: the same numbers to rounding, and gradients and copies as before."""

from types import MethodType

import pytest
import torch
from torch import nn

from lorakit.ops._internals import has_onednn_linear
from lorakit.ops.onednn_linear import onednn_forward, use_onednn
from lorakit.slots.hooks import copy_with

pytestmark = pytest.mark.skipif(not has_onednn_linear(), reason="this torch is built without oneDNN")


def layer_by_onednn(*, bias: bool = False) -> nn.Linear:
    layer = nn.Linear(48, 32, bias=bias).requires_grad_(False)
    layer.__dict__["forward"] = MethodType(onednn_forward, layer)
    return layer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(48,), (1, 48), (3, 1, 48), (2, 5, 48), (0, 48)])
def test_the_product_is_the_layers_own_to_rounding(bias: bool, shape: tuple[int, ...]) -> None:
    layer, x = layer_by_onednn(bias=bias), torch.randn(shape)

    with torch.no_grad():
        torch.testing.assert_close(layer(x), nn.Linear.forward(layer, x))


def test_gradients_flow_through_the_layer() -> None:
    layer, x = layer_by_onednn(), torch.randn(3, 48, requires_grad=True)

    layer(x).sum().backward()

    assert x.grad is not None
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(3, -1))


def test_a_copy_with_another_weight_multiplies_by_its_own() -> None:
    layer, weight = layer_by_onednn(), torch.randn(32, 48)
    x = torch.randn(3, 48)

    with torch.no_grad():
        torch.testing.assert_close(copy_with(layer, {"weight": weight})(x), x @ weight.T)
        torch.testing.assert_close(layer(x), x @ layer.weight.T)


def test_layers_that_are_not_plain_float32_stay_as_they_are() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16), Doubled(4, 4), nn.Embedding(4, 4))

    assert use_onednn(model) == 0
    assert not any("forward" in module.__dict__ for module in model)
