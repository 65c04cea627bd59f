"""Multiply by frozen weights with oneDNN instead of BLAS, where that is faster on this CPU (decision 0039).

torch's float32 products are MKL's, which on AMD's processors reach half of what oneDNN does. Other dtypes and devices,
small weights, autocast, and weights that are trained stay torch's.
Invariant: weights are never written, and results differ by rounding alone; prepacked weights alone are copied.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map

from lorakit.ops._internals import has_bfloat16_products, has_onednn_linear, onednn_linear, onednn_packed

Products = Literal["torch", "onednn", "prepacked"]
"""prepacked: by oneDNN, plain linear layers from copies of their weights, for few rows without a graph"""
GetWeight = Callable[[], Tensor]
MATMUL: Final = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)

MIN_NUMBERS: Final = 100_000
"""of a weight; because oneDNN compiles a kernel for every new number of rows, which takes about a millisecond"""
PACKED_ROWS: Final = 8  # for which weights are packed: few, as when a server decodes; more rows are slower by little


def call_with_full(kind: type[Any], func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Call a torch function with the tensor, ``full()``, of each argument of a class that stands for one."""
    args, kwargs = tree_map(lambda arg: arg.full() if isinstance(arg, kind) else arg, (args, kwargs or {}))
    return func(*args, **kwargs)


def use_products(model: nn.Module, products: Products) -> None:
    """Have a model multiply by its frozen weights with these products: in linear layers, adapted or not, and heads."""
    by_onednn = products != "torch"
    for module in model.modules():
        if hasattr(type(module), "by_onednn"):  # a layer of lorakit's own
            setattr(module, "by_onednn", by_onednn)  # noqa: B010, because a module's attributes have no types
        elif by_onednn and type(module) is nn.Linear and _has_no_other_forward(module):
            forward = partial(onednn_forward, module)  # which is copied and pickled with its layer
            if products == "prepacked" and can_prepack(module.weight):
                forward = partial(prepacked_forward, module, PackedWeight(module.weight))
            module.__dict__["forward"] = forward


def _has_no_other_forward(layer: nn.Linear) -> bool:
    """True if a layer's forward is its class's or from here."""
    forward = layer.__dict__.get("forward")
    return forward is None or getattr(forward, "func", None) in (onednn_forward, prepacked_forward)


def onednn_forward(layer: nn.Linear, input: Tensor) -> Tensor:
    """Return a linear layer's output, by oneDNN where that can compute it: its method ``forward``."""
    has_graph = torch.is_grad_enabled()
    is_trained = has_graph and (layer.weight.requires_grad or (layer.bias is not None and layer.bias.requires_grad))
    if is_trained or not _fits(input, layer.weight):
        return F.linear(input, layer.weight, layer.bias)
    if has_graph:
        return frozen_linear(input, partial(getattr, layer, "weight"), layer.bias, by_onednn=True)
    return linear(input, layer.weight, layer.bias, by_onednn=True)


def packed_bytes(model: nn.Module) -> int:
    """Return the bytes of the copies that ``use_products(model, "prepacked")`` makes."""
    layers = (module for module in model.modules() if type(module) is nn.Linear)
    return sum(layer.weight.nbytes for layer in layers if can_prepack(layer.weight))


@final
class PackedWeight:
    """A frozen weight's copy in oneDNN's order. It serves this weight alone: no copy of it, and not once it changes."""

    def __init__(self, weight: Tensor) -> None:
        self.packed = onednn_packed(weight, PACKED_ROWS)
        self._weight = weight
        self._values = weight.data_ptr(), weight._version

    def is_of(self, weight: Tensor) -> bool:
        """True if this is a copy of the weight as it is now."""
        return weight is self._weight and (weight.data_ptr(), weight._version) == self._values

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # torch cannot copy it


def prepacked_forward(layer: nn.Linear, weight: PackedWeight, input: Tensor) -> Tensor:
    """Return a linear layer's output, from a packed copy of its weight where that can be used: its ``forward``."""
    own = layer.weight
    is_plain = input.dtype == own.dtype and not torch.is_autocast_enabled("cpu")
    if torch.is_grad_enabled() or not is_plain or not weight.is_of(own):
        return onednn_forward(layer, input)
    return onednn_linear(input, weight.packed, layer.bias)


def frozen_linear(x: Tensor, weight: GetWeight, bias: Tensor | None, *, by_onednn: bool) -> Tensor:
    """Return x W^T + b (..., out) for x (..., in). `weight` returns W (out, in), in forward and in backward."""
    return _FrozenLinear.apply(x, weight, bias, by_onednn)  # type: ignore[no-untyped-call]


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
    """True if products with this weight can be oneDNN's. Those in 16 bits are already, as far as torch can."""
    if torch.compiler.is_compiling():  # first, because a compiler cannot read what follows
        return False
    return weight.dtype == torch.float32 and _is_large(weight) and has_onednn_linear()


def can_prepack(weight: Tensor) -> bool:
    """True if a copy of this weight can be in oneDNN's order."""
    is_fast = weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and has_bfloat16_products())
    return is_fast and _is_large(weight) and has_onednn_linear()


def _is_large(weight: Tensor) -> bool:
    return weight.numel() >= MIN_NUMBERS and weight.device.type == "cpu"
