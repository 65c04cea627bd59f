"""y = x W^T + b + s (x' A^T) B^T in one piece, with the order of products that reads and writes the least.

The small product comes first and the large one is added onto it, so y is written once; dY B is made once and used
twice; x is kept as it is, without a copy in another dtype, and dropout by its seed instead of its mask. W does not
learn. Letters as in methods.py; x' is x after dropout. Formulas: shared by every exact implementation.
"""

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def fits_product(x: Tensor, weight: Tensor) -> bool:
    """Whether the product can be made in one piece: one dtype throughout, which no autocast changes."""
    return x.dtype == weight.dtype and not weight.requires_grad and not torch.is_autocast_enabled(x.device.type)


def adapted_product(
    x: Tensor, weight: nn.Parameter, bias: Tensor | None, A: Tensor, B: Tensor, s: float, *, transposed: bool,
    dropout: float,
) -> Tensor:  # fmt: skip
    """x (..., in), weight (out, in) or with ``transposed`` (in, out), A (r, in), B (out, r) -> y (..., out)."""
    seed = int(torch.randint(1 << 62, ())) if dropout > 0 else None
    flat = x.reshape(-1, x.shape[-1])
    y: Tensor = _Product.apply(flat, weight, bias, A, B, s, transposed, dropout, seed)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], y.shape[-1])


def dropped(x: Tensor, p: float, seed: int | None) -> Tensor:
    """x with each value zero with probability p and the others divided by 1 - p; the same for the same seed."""
    if seed is None:
        return x
    numbers = torch.Generator(x.device).manual_seed(seed)
    kept = torch.empty_like(x).bernoulli_(1 - p, generator=numbers)
    return kept.mul_(1 / (1 - p)).mul_(x)


@final
class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, A: Tensor, B: Tensor, s: float,
        transposed: bool, dropout: float, seed: int | None,
    ) -> Tensor:  # fmt: skip
        S = dropped(x, dropout, seed) @ A.to(x.dtype).T
        y = S @ (B * s).to(x.dtype).T
        if bias is not None:
            y += bias
        y.addmm_(x, weight if transposed else weight.T)
        ctx.save_for_backward(x, A, B, S)
        # the object, not its values: an engine may take these away until backward and bring them back
        ctx.weight, ctx.s, ctx.transposed, ctx.dropout, ctx.seed = weight, s, transposed, dropout, seed
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Any) -> Any:
        (dy,) = outer
        x, A, B, S = ctx.saved_tensors
        for_x, _, for_bias, for_A, for_B = ctx.needs_input_grad[:5]
        dx = dbias = dA = dB = None
        D = dy @ (B * ctx.s).to(dy.dtype)
        if for_B:
            dB = (dy.T @ S).to(B.dtype).mul_(ctx.s)
        if for_A:
            dA = (D.T @ dropped(x, ctx.dropout, ctx.seed)).to(A.dtype)
        if for_x:
            # dropout multiplies by numbers that do not depend on x, so its gradient is itself
            dx = dropped(D @ A.to(D.dtype), ctx.dropout, ctx.seed)
            dx.addmm_(dy, ctx.weight.T if ctx.transposed else ctx.weight)
        if for_bias:
            dbias = dy.sum(0)
        return dx, None, dbias, dA, dB, None, None, None, None
