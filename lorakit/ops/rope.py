"""Rotary positions with one and a half tensors instead of four and a half, forward and backward.

(a, b) -> (a cos - b sin, b cos + a sin) for the two halves a, b of every head (Su et al. 2021, arXiv 2104.09864).
"""

from functools import cache
from types import FunctionType, MethodType
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lorakit.ops.source_match import normalized_source

NAME: Final = "apply_rotary_pos_emb"
CODES: Final = {
    NAME: "cos = cos.unsqueeze(unsqueeze_dim); sin = sin.unsqueeze(unsqueeze_dim); q_embed = q * cos + rotate_half(q)"
    " * sin; k_embed = k * cos + rotate_half(k) * sin; return (q_embed, k_embed)",
    "rotate_half": "x1 = x[..., :x.shape[-1] // 2]; x2 = x[..., x.shape[-1] // 2:];"
    " return torch.cat((-x2, x1), dim=-1)",
}


def fuse_rope(model: nn.Module) -> None:
    """Let every attention of a model that turns its queries and keys so do it with less; the same bits."""
    for module in model.modules():
        if is_rotary(module):
            module.forward = MethodType(_with_turned(type(module).forward), module)


def is_rotary(module: nn.Module) -> bool:
    """Whether a module's forward calls that very function by its name."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or "forward" in vars(module) or NAME not in forward.__code__.co_names:
        return False
    names = forward.__globals__
    return all(name in names and normalized_source(names[name]) == code for name, code in CODES.items())


@cache
def _with_turned(forward: FunctionType) -> FunctionType:
    """The same function, with another one under that name."""
    names = forward.__globals__ | {NAME: apply_rope}
    made = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """q, k (batch, heads, tokens, d), cos, sin (batch, tokens, d) -> q and k at their positions."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _Rope.apply(q, cos, sin), _Rope.apply(k, cos, sin)  # type: ignore[no-untyped-call]


@final
class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        half = x.shape[-1] // 2
        y = x * cos
        y[..., :half] -= x[..., half:] * sin[..., :half]
        y[..., half:] += x[..., :half] * sin[..., half:]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Any) -> Any:
        (dy,) = outer
        cos, sin = ctx.saved_tensors
        half = dy.shape[-1] // 2
        dx = dy * cos
        dx[..., :half] += dy[..., half:] * sin[..., half:]
        dx[..., half:] -= dy[..., :half] * sin[..., :half]
        return dx.to(ctx.dtype), None, None
