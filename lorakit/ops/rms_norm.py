"""RMS norms that keep what they read and one number per token: no float32 copy, no square, no normed value.

y = w * x / sqrt(mean(x^2) + eps), computed in float32 with one tensor of its own (Zhang & Sennrich 2019,
arXiv 1910.07467). w does not learn.
"""

from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lorakit.ops.source_match import forward_source

FIRST: Final = (
    "input_dtype = hidden_states.dtype; hidden_states = hidden_states.to(torch.float32);"
    " variance = hidden_states.pow(2).mean(-1, keepdim=True);"
    " hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon); "
)
ROUNDED_LAST: Final = {
    FIRST + "return self.weight * hidden_states.to(input_dtype)": False,
    FIRST + "return (self.weight * hidden_states).to(input_dtype)": True,
}
"""A norm's code -> whether its weight comes before the rounding to x's dtype."""


def fuse_rms_norms(model: nn.Module) -> None:
    """Let every such norm of a model keep less; its outputs are the same bits."""
    for module in model.modules():
        if is_rms_norm(module):
            module.forward = partial(_forward, module, ROUNDED_LAST[forward_source(module)])


def is_rms_norm(module: nn.Module) -> bool:
    """Whether a module is an RMS norm by its code."""
    return forward_source(module) in ROUNDED_LAST


def _forward(module: Any, rounded_last: bool, hidden_states: Tensor) -> Tensor:
    if module.weight.requires_grad:
        learnt: Tensor = type(module).forward(module, hidden_states)
        return learnt
    y: Tensor = _RMSNorm.apply(hidden_states, module.weight, module.variance_epsilon, rounded_last)  # type: ignore[no-untyped-call]
    return y


@final
class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, rounded_last: bool) -> Tensor:
        wide = x.to(torch.float32)
        own = wide.pow(2)
        inverse = torch.rsqrt(own.mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, inverse, weight)
        ctx.rounded_last, ctx.again = rounded_last, _again
        return _weighted(torch.mul(wide, inverse, out=own), weight, x.dtype, rounded_last)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Any) -> Any:
        x, inverse, weight = ctx.saved_tensors
        d, normed = outer[0].to(torch.float32) * weight, x.to(torch.float32) * inverse
        along = (d * normed).mean(-1, keepdim=True)
        return d.addcmul_(normed, along, value=-1).mul_(inverse).to(x.dtype), None, None, None


def _weighted(normed: Tensor, weight: Tensor, dtype: torch.dtype, rounded_last: bool) -> Tensor:
    """The normed value, which is overwritten, times the weight."""
    rounded = normed if rounded_last else normed.to(dtype)
    fits = torch.result_type(rounded, weight) == rounded.dtype
    product = rounded.mul_(weight) if fits else rounded * weight
    return product.to(dtype) if rounded_last else product


def _again(ctx: Any) -> Tensor:
    x, inverse, weight = ctx.saved_tensors
    return _weighted(x.to(torch.float32) * inverse, weight, x.dtype, ctx.rounded_last)
