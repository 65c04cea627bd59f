"""Multiply by frozen weights with oneDNN instead of BLAS, where that is faster on this CPU (decision 0039).

torch's float32 products are MKL's, which on AMD's processors reach half of what oneDNN does.
Invariant: weights are neither written nor copied, and results differ by rounding alone. What oneDNN cannot compute or
would compute slower, torch does: other dtypes and devices, small weights, autocast, weights that are trained.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lorakit.ops._internals import has_onednn_linear, onednn_linear

Products = Literal["torch", "onednn"]
GetWeight = Callable[[], Tensor]

MIN_NUMBERS: Final = 100_000
"""of a weight; because oneDNN compiles a kernel for every new number of rows, which takes about a millisecond"""


def use_products(model: nn.Module, products: Products) -> None:
    """Have a model multiply by its frozen weights with these products: linear layers, adapted or not, and loss heads.

    Layers of lorakit's own have an attribute `by_onednn`; a plain layer of torch gets a forward of its own.
    """
    by_onednn = products == "onednn"
    for module in model.modules():
        if hasattr(type(module), "by_onednn"):
            setattr(module, "by_onednn", by_onednn)  # noqa: B010, because a module's attributes have no types
        elif by_onednn and type(module) is nn.Linear and "forward" not in module.__dict__:
            module.__dict__["forward"] = partial(onednn_forward, module)  # which is copied and pickled with its layer


def onednn_forward(layer: nn.Linear, input: Tensor) -> Tensor:
    """Return a linear layer's output, by oneDNN where that can compute it: its method ``forward``."""
    has_graph = torch.is_grad_enabled()
    is_trained = has_graph and (layer.weight.requires_grad or (layer.bias is not None and layer.bias.requires_grad))
    if is_trained or not _fits(input, layer.weight):
        return F.linear(input, layer.weight, layer.bias)
    if has_graph:
        return frozen_linear(input, partial(getattr, layer, "weight"), layer.bias, by_onednn=True)
    return linear(input, layer.weight, layer.bias, by_onednn=True)


def frozen_linear(x: Tensor, weight: GetWeight, bias: Tensor | None, *, by_onednn: bool) -> Tensor:
    """Return x W^T + b (..., out) for x (..., in). `weight` returns W (out, in), in forward and in backward."""
    y: Tensor = _FrozenLinear.apply(x, weight, bias, by_onednn)  # type: ignore[no-untyped-call]
    return y


class _FrozenLinear(torch.autograd.Function):
    """Saves the function that returns W, because W may be dequantised, and engines replace and free it in between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: GetWeight, bias: Tensor | None, by_onednn: bool) -> Tensor:
        ctx.weight = weight
        ctx.by_onednn = by_onednn
        return linear(x, weight().to(x.dtype), bias, by_onednn=by_onednn)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Any) -> tuple[Tensor | None, None, Tensor | None, None]:
        (dy,) = outer
        needs_dx, _, needs_dbias, _ = ctx.needs_input_grad
        dx = linear(dy, ctx.weight().to(dy.dtype).T, None, by_onednn=ctx.by_onednn) if needs_dx else None
        return dx, None, dy.reshape(-1, dy.shape[-1]).sum(0) if needs_dbias else None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, by_onednn: bool) -> Tensor:
    """Return x W^T + b (..., out) for x (..., in), without a graph."""
    product = onednn_linear if by_onednn and _fits(x, weight) else F.linear
    y = product(x.reshape(-1, x.shape[-1]), weight, bias)
    return y.resize_(*x.shape[:-1], len(weight))  # no view, into which no model could write


def add_product(y: Tensor, x: Tensor, weight: Tensor, *, by_onednn: bool) -> Tensor:
    """Return y + x W^T for y (rows, out) and x (rows, in), without a graph. May overwrite y."""
    return onednn_linear(x, weight, None, y) if by_onednn and _fits(x, weight) else y.addmm_(x, weight.T)


def _fits(x: Tensor, weight: Tensor) -> bool:
    return x.dtype == weight.dtype and has_onednn(weight) and not torch.is_autocast_enabled("cpu")


def has_onednn(weight: Tensor) -> bool:
    """True if products with this weight can be oneDNN's."""
    if torch.compiler.is_compiling():  # first, because a compiler cannot read what follows
        return False
    is_large = weight.numel() >= MIN_NUMBERS and weight.device.type == "cpu"
    return is_large and weight.dtype == torch.float32 and has_onednn_linear()
