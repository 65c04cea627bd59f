"""y = x W^T + b + s (x' A^T) B^T in one piece, with the order of products that reads and writes the least.

The small product comes first and the large one is added onto it, so y is written once; dY B is made once and used
twice; x is kept as it is, without a copy in another dtype, or not at all where it can be made again; dropout is kept
by its seed instead of its mask. W does not learn. Letters as in methods.py; x' is x after dropout.
"""

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lorakit.ops.recompute import RecomputedInput, recomputable

Weight = Callable[[], Tensor]


def can_fuse(x: Tensor, weight: Tensor) -> bool:
    """Whether the product can be made in one piece: one dtype throughout, unless packed, which no autocast changes."""
    device = x.device.type
    cast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    same = x.dtype == weight.dtype or not weight.is_floating_point()
    return same and not weight.requires_grad and not cast


def lora_linear(
    x: Tensor, weight: Weight, bias: Tensor | None, A: Tensor, B: Tensor, s: float, *, transposed: bool,
    dropout: float,
) -> Tensor:  # fmt: skip
    """x (..., in), () -> weight (out, in) or with ``transposed`` (in, out), A (r, in), B (out, r) -> y (..., out)."""
    seed = int(torch.randint(1 << 62, ())) if dropout > 0 else None
    again = recomputable(x) if torch.is_grad_enabled() else None
    y: Tensor = _LoraLinearFunction.apply(x, weight, bias, A, B, s, transposed, dropout, seed, again)  # type: ignore[no-untyped-call]
    return y


def apply_dropout(x: Tensor, p: float, seed: int | None) -> Tensor:
    """x with each value zero with probability p and the others divided by 1 - p; the same for the same seed."""
    if seed is None:
        return x
    numbers = None if x.is_meta else torch.Generator(x.device).manual_seed(seed)
    kept = torch.empty_like(x).bernoulli_(1 - p, generator=numbers)
    return kept.mul_(1 / (1 - p)).mul_(x)


@final
class _LoraLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Weight, bias: Tensor | None, A: Tensor, B: Tensor, s: float,
        transposed: bool, dropout: float, seed: int | None, again: RecomputedInput | None,
    ) -> Tensor:  # fmt: skip
        given = x
        x = given.reshape(-1, given.shape[-1])
        S = apply_dropout(x, dropout, seed) @ A.to(x.dtype).T
        y = S @ (B * s).to(x.dtype).T
        if bias is not None:
            y += bias
        W = weight().to(x.dtype)
        y.addmm_(x, W if transposed else W.T)
        ctx.save_for_backward(A, B, S, *([x] if again is None else []))
        # where W is found, not W: it may be packed, and an engine may take it away until backward and bring it back
        ctx.weight, ctx.s, ctx.transposed, ctx.dropout, ctx.seed = weight, s, transposed, dropout, seed
        ctx.again = again
        return y.view(*given.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Any) -> Any:
        A, B, S, *kept = ctx.saved_tensors
        shape = (*outer[0].shape[:-1], A.shape[1])
        dy = outer[0].reshape(-1, outer[0].shape[-1])
        for_x, _, for_bias, for_A, for_B = ctx.needs_input_grad[:5]
        dx = dbias = dA = dB = None
        D = dy @ (B * ctx.s).to(dy.dtype)
        if for_B:
            dB = (S.T @ dy).to(B.dtype).mul_(ctx.s).T  # in this order of the two, twice as fast on CPUs
        if for_A:
            x = kept[0] if ctx.again is None else ctx.again.get().reshape(-1, A.shape[1])
            dA = (D.T @ apply_dropout(x, ctx.dropout, ctx.seed)).to(A.dtype)
        if for_x:
            # dropout multiplies by numbers that do not depend on x, so its gradient is itself
            dx = apply_dropout(D @ A.to(D.dtype), ctx.dropout, ctx.seed)
            W = ctx.weight().to(dy.dtype)
            dx.addmm_(dy, W.T if ctx.transposed else W)
            dx = dx.view(shape)
        if for_bias:
            dbias = dy.sum(0)
        return dx, None, dbias, dA, dB, None, None, None, None, None
