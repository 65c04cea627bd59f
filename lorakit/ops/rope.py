"""Fuse rotary positions, so that a call allocates 1.5 tensors of the size of its input instead of 4.5.

(a, b) -> (a cos - b sin, b cos + a sin) for the two halves a, b of every head (Su et al. 2021, arXiv 2104.09864).
"""

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lorakit.ops.source_match import normalized_source

NAME: Final = "apply_rotary_pos_emb"
SOURCES: Final = {
    NAME: "cos = cos.unsqueeze(unsqueeze_dim); sin = sin.unsqueeze(unsqueeze_dim); q_embed = q * cos + rotate_half(q)"
    " * sin; k_embed = k * cos + rotate_half(k) * sin; return (q_embed, k_embed)",
    "rotate_half": "x1 = x[..., :x.shape[-1] // 2]; x2 = x[..., x.shape[-1] // 2:];"
    " return torch.cat((-x2, x1), dim=-1)",
}
"""name of a function in a model's module -> its source; transformers has one copy of both in each model's file"""


def resembles_rope(module: nn.Module) -> bool:
    """True if a module's forward calls a global function `apply_rotary_pos_emb`, whatever its code."""
    forward = type(module).forward
    return isinstance(forward, FunctionType) and "forward" not in vars(module) and NAME in forward.__code__.co_names


def uses_rope(module: nn.Module) -> bool:
    """True if a module's forward calls the global `apply_rotary_pos_emb`, and that has the known code."""
    if not resembles_rope(module):
        return False
    names = type(module).forward.__globals__
    return all(name in names and normalized_source(names[name]) == source for name, source in SOURCES.items())


def fused_rope_forward(cls: type[nn.Module]) -> Callable[..., Any]:
    """Return a copy of a class's forward in which the name `apply_rotary_pos_emb` means `apply_rope`.

    The model's module itself is not patched, because models that are not adapted share its globals. The copy has a
    snapshot of them: once another library has patched one that it uses, the class's own forward runs instead.
    """
    forward = cls.forward
    assert isinstance(forward, FunctionType)
    names = forward.__globals__
    used = {name: names[name] for name in (*forward.__code__.co_names, *SOURCES) if name in names}
    copied = FunctionType(
        forward.__code__, names | {NAME: apply_rope}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copied.__kwdefaults__ = forward.__kwdefaults__

    @wraps(forward)
    def fused(*args: Any, **kwargs: Any) -> Any:
        is_patched = any(names.get(name) is not value for name, value in used.items())
        return (forward if is_patched else copied)(*args, **kwargs)

    return fused


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate q and k (batch, heads, tokens, d) by the positions in cos and sin (batch, tokens, d).

    Name and order of the parameters are those of transformers' function, whose callers call this one.
    """
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _Rope.apply(q, cos, sin), _Rope.apply(k, cos, sin)  # type: ignore[no-untyped-call]


@final
class _Rope(torch.autograd.Function):
    """A rotation, whose backward is the rotation by the opposite angle. Saves cos and sin, which all layers share."""

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
        return dx.to(ctx.dtype), None, None  # cos and sin may be float32 beside a 16-bit x
