"""Compute y = x W^T + b + s (x' A^T) B^T as one autograd function, in the order that reads and writes the least.

This is the formula of `lora.methods.apply_low_rank`, for a frozen W and one dtype. The letters are those of that file;
x' is x after dropout. Plain autograd would write three tensors of y's size, and save x, x', the dropout mask and W.

- forward computes the small product first and adds the large one onto it, so y is written once;
- backward computes dY B once and uses it for dA and dx;
- of x, nothing is saved where A is frozen or `ops.recompute` can recompute x for its gradient; otherwise x itself,
  without a copy in another dtype;
- of dropout's mask, only the keys are saved, and of W the function that returns it.

With a gain g, y becomes g (x W^T + s (x A^T) B^T), and that product is saved too, because g's gradient needs it.
"""

from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lorakit.ops.dropout import DropoutMask, dropped
from lorakit.ops.products import GetWeight, add_product
from lorakit.ops.recompute import RecomputedInput, recomputable


def can_fuse(x: Tensor, weight: Tensor) -> bool:
    """True if `lora_linear` computes the product of this x and stored weight as plain torch would.

    W must be frozen, x of W's dtype or W quantised, autocast off. torch.compile fuses plain operations itself.
    """
    if torch.compiler.is_compiling() or not x.is_floating_point():
        return False
    device = x.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    same_dtype = x.dtype == weight.dtype or not weight.is_floating_point()
    return same_dtype and not weight.requires_grad and not autocast


def lora_linear(
    x: Tensor,
    weight: GetWeight,
    bias: Tensor | None,
    A: Tensor,
    B: Tensor,
    s: float,
    *,
    mask: DropoutMask | None = None,
    gain: Tensor | None = None,
    by_onednn: bool = False,
) -> Tensor:
    """Return y (..., out) for x (..., in), A (r, in) and B (out, r); A and B may be float32 beside a 16-bit x.

    `weight` returns W as floats, (out, in). `mask`: the zeros of x'; None: x' is x.
    `gain`: (out,) float32, by which y is multiplied before it is rounded (DoRA); then without bias and dropout.
    `by_onednn`: multiply by W with oneDNN, where it can (`ops.products`).
    """
    assert gain is None or (bias is None and mask is None)
    recomputed = recomputable(x) if A.requires_grad and torch.is_grad_enabled() else None
    return _LoraLinearFunction.apply(x, weight, bias, A, B, s, mask, recomputed, gain, by_onednn)  # type: ignore[no-untyped-call]


@final
class _LoraLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: GetWeight,
        bias: Tensor | None,
        A: Tensor,
        B: Tensor,
        s: float,
        mask: DropoutMask | None,
        recomputed: RecomputedInput | None,
        gain: Tensor | None,
        by_onednn: bool,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        # cast A and B to x's dtype, not x to theirs: x is large, and would be copied in every layer
        S = dropped(rows, mask) @ A.to(x.dtype).T
        y = S @ (B * s).to(x.dtype).T
        if bias is not None:
            y += bias
        y = add_product(y, rows, weight().to(x.dtype), by_onednn=by_onednn)
        # no view, because some models write into a layer's output, which autograd refuses then
        output = y.resize_(*x.shape[:-1], len(B))
        saves_x = ctx.needs_input_grad[3] and recomputed is None
        ctx.save_for_backward(A, B, S, *([rows] if saves_x else []), *([] if gain is None else [gain, output]))
        ctx.has_gain = gain is not None
        # the function, not W: W may be dequantised for this call only, and ZeRO-3 frees it until this layer's backward
        ctx.weight = weight
        ctx.s = s
        ctx.mask = mask
        ctx.recomputed = recomputed
        ctx.by_onednn = by_onednn
        return output if gain is None else (output * gain).to(output.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Any) -> Any:
        A, B, S, *saved = ctx.saved_tensors
        shape = (*outer[0].shape[:-1], A.shape[1])
        dy = outer[0].reshape(-1, outer[0].shape[-1])
        needs_dx, _, needs_dbias, needs_dA, needs_dB = ctx.needs_input_grad[:5]
        dx = dbias = dA = dB = dgain = None
        if ctx.has_gain:
            gain, product = saved[-2:]
            dgain = (dy * product.view_as(dy)).sum(0, dtype=gain.dtype)
            dy = (dy * gain).to(dy.dtype)
        D = dy @ (B * ctx.s).to(dy.dtype)
        if needs_dB:
            dB = (S.T @ dy).to(B.dtype).mul_(ctx.s).T  # twice as fast on CPUs as dy.T @ S
        if needs_dA:
            x = saved[0] if ctx.recomputed is None else ctx.recomputed.get()
            dA = (D.T @ dropped(x.reshape(-1, A.shape[1]), ctx.mask)).to(A.dtype)
            del x  # before W is in memory
        if needs_dx:
            # dropout multiplies by numbers that do not depend on x, so its gradient is the same multiplication
            dx = dropped(D @ A.to(D.dtype), ctx.mask)
            dx = add_product(dx, dy, ctx.weight().to(dy.dtype).T, by_onednn=ctx.by_onednn).view(shape)
        if needs_dbias:
            dbias = dy.sum(0)
        return dx, None, dbias, dA, dB, None, None, None, dgain, None
