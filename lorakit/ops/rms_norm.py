"""Fuse RMS norms with frozen weights, so that they save their input and one number per token only.

y = w * x / sqrt(mean(x^2) + eps), in float32 with one temporary tensor (Zhang and Sennrich 2019, arXiv 1910.07467).
Autograd would also save a float32 copy of x, and the normalised x before it is multiplied by w.
"""

from collections.abc import Callable
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lorakit.ops.source_match import forward_source, normalized_source

NORMALIZE: Final = (
    "input_dtype = hidden_states.dtype; hidden_states = hidden_states.to(torch.float32);"
    " variance = hidden_states.pow(2).mean(-1, keepdim=True);"
    " hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon); "
)
ROUNDED_LAST: Final = {
    NORMALIZE + "return self.weight * hidden_states.to(input_dtype)": False,
    NORMALIZE + "return (self.weight * hidden_states).to(input_dtype)": True,
}
"""source of a norm's forward -> True if it multiplies by w in float32 and rounds to x's dtype last (OLMo 2)"""


def resembles_rms_norm(module: nn.Module) -> bool:
    """True if a module is an RMS norm by its name."""
    return type(module).__name__.endswith("RMSNorm")


def is_rms_norm(module: nn.Module) -> bool:
    """True if a module's forward has the code of an RMS norm, with either order of product and rounding."""
    return forward_source(module) in ROUNDED_LAST


def fused_norm_forward(cls: type[nn.Module]) -> Callable[..., Tensor]:
    """Return the forward that replaces a norm's own where w is frozen."""
    rounded_last = ROUNDED_LAST[normalized_source(cls.forward)]

    def forward(module: Any, hidden_states: Tensor) -> Tensor:
        if module.weight.requires_grad:  # read in every call, because a norm may become trainable after it was fused
            trainable: Tensor = cls.forward(module, hidden_states)
            return trainable
        y: Tensor = _RMSNorm.apply(hidden_states, module.weight, module.variance_epsilon, rounded_last)  # type: ignore[no-untyped-call]
        return y

    return forward


@final
class _RMSNorm(torch.autograd.Function):
    """The norm for a frozen w. `ctx.recompute` lets `ops.recompute` compute y once more from x and 1 / rms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, rounded_last: bool) -> Tensor:
        x32 = x.to(torch.float32)
        squares = x32.pow(2)
        inverse_rms = torch.rsqrt(squares.mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, inverse_rms, weight)
        ctx.rounded_last = rounded_last
        ctx.recompute = _recompute
        # write into `squares`, not into x32: where x is float32 already, x32 is x itself
        return _weighted(torch.mul(x32, inverse_rms, out=squares), weight, x.dtype, rounded_last)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Any) -> Any:
        # with n = x / rms and d = w dy:  dx = (d - n mean(d n)) / rms
        x, inverse_rms, weight = ctx.saved_tensors
        d = outer[0].to(torch.float32) * weight
        normed = x.to(torch.float32) * inverse_rms
        mean = (d * normed).mean(-1, keepdim=True)
        return d.addcmul_(normed, mean, value=-1).mul_(inverse_rms).to(x.dtype), None, None, None


def _weighted(normed: Tensor, weight: Tensor, dtype: torch.dtype, rounded_last: bool) -> Tensor:
    """Return w * normed in `dtype`, with the rounding of the model's own code. Overwrites `normed`."""
    rounded = normed if rounded_last else normed.to(dtype)
    overwrites = torch.result_type(rounded, weight) == rounded.dtype
    product = rounded.mul_(weight) if overwrites else rounded * weight
    return product.to(dtype) if rounded_last else product


def _recompute(ctx: Any) -> Tensor:
    x, inverse_rms, weight = ctx.saved_tensors
    return _weighted(x.to(torch.float32) * inverse_rms, weight, x.dtype, ctx.rounded_last)
