"""Attend to all rows of a packed line in one call of torch's variable-length kernel.

A kernel is probed before a run relies on it: outputs and gradients must be those of rows one by one (decision 0019).
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Window = tuple[int, int]
"""how many tokens before and after itself a token attends to; -1: all of its row"""
CAUSAL: Final = (-1, 0)
PROBE_WINDOW: Final = (3, 0)
DTYPES: Final = (torch.bfloat16, torch.float16)
MAX_HEAD_SIZE: Final = 256
UNSUPPORTED_ARGUMENTS: Final = ("softcap", "s_aux", "position_bias", "cache")
"""arguments that transformers may pass to attention, and that change the result in ways the kernel has not"""
PROBE_LENGTHS: Final = (130, 1, 200)
"""tokens of the probe's rows: full and partial blocks, since kernels work on blocks of 64 or 128 tokens"""
TOLERANCE: Final = 0.03
"""largest relative error of a probe, in norm; rounding to bfloat16 alone gives 0.007"""
NOT_CALLED: Final = "does not take this model's attention, or its dtype"


@final
class VarlenKernel:
    """A function with the arguments of torch's ``varlen_attn``, for queries, keys and values of one of `dtypes`."""

    def __init__(self, function: Callable[..., Any], dtypes: Sequence[torch.dtype] = DTYPES) -> None:
        self._function, self._dtypes = function, dtypes
        self._has_gqa = "enable_gqa" in inspect.signature(function).parameters

    def supports(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, arguments: Mapping[str, Any]
    ) -> bool:
        """True if the kernel takes such heads (1, heads, tokens, size) and can do all that `arguments` ask for."""
        size = query.shape[-1]
        fits = key.shape[-1] == value.shape[-1] == size <= MAX_HEAD_SIZE and size % 8 == 0
        typed = query.dtype == key.dtype == value.dtype and query.dtype in self._dtypes
        causal = arguments.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal  # as transformers' sdpa decides it
        return (
            fits
            and typed
            and causal
            and not arguments.get("dropout")
            and all(arguments.get(name) is None for name in UNSUPPORTED_ARGUMENTS)
        )

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        window: Window,
        scale: float | None,
    ) -> Tensor:
        """Attend within each row: query (1, heads, tokens, size), key and value (1, key heads, tokens, size).

        `cu_seqlens`: from `row_bounds`. `max_seqlen`: tokens of the longest row. Returns (1, tokens, heads, size).
        """
        gqa = {"enable_gqa": True} if self._has_gqa else {}
        if not gqa:  # older versions of torch need one key head for each query head
            key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        output: Tensor = self._function(
            q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale=scale, window_size=window, **gqa
        )
        return output[None]


@final
class KernelProbe:
    """Stands for a kernel during one forward pass: tries the kernel, and returns None, so that rows attend one by one.

    The kernel is run on the model's own heads, and compared on random rows with heads like these. `problem`: why the
    kernel must not be used; None once it was called and gave the right results.
    """

    def __init__(self, kernel: VarlenKernel) -> None:
        self.kernel, self.supports = kernel, kernel.supports
        self.problem: str | None = NOT_CALLED

    def __call__(self, query: Tensor, key: Tensor, *arguments: Any) -> None:
        """Take the arguments of a `VarlenKernel`."""
        if self.problem not in (None, NOT_CALLED):
            return
        scale = arguments[-1]
        try:
            self.kernel(query, key, *arguments)
            errors = [
                _relative_error(self.kernel, query, key.shape[1], window, scale) for window in (CAUSAL, PROBE_WINDOW)
            ]
            wrong = [error for error in errors if not error <= TOLERANCE]  # `not <=`: NaN is wrong too
            self.problem = f"is off by {wrong[0]:.1%} on this device" if wrong else None
        except (RuntimeError, TypeError, ValueError) as problem:
            self.problem = f"does not run on this device ({str(problem).partition(chr(10))[0]})"


def varlen_kernel(device: torch.device) -> VarlenKernel | None:
    """Return torch's kernel; None on a device without one, or where an older torch has it without scale and window."""
    if device.type != "cuda":
        return None
    from torch.nn.attention.varlen import varlen_attn  # here, because the import takes a second

    parameters = inspect.signature(varlen_attn).parameters
    return VarlenKernel(varlen_attn) if {"scale", "window_size"} <= parameters.keys() else None


def row_bounds(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return where each row starts, and where the last one ends: (rows + 1,) int32. Does not wait for the device."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)


def _relative_error(
    kernel: VarlenKernel, query: Tensor, num_key_heads: int, window: Window, scale: float | None
) -> float:
    """Return the kernel's error on random rows against float32 row by row, |a - b| / |b|; NaN if any value is NaN.

    The largest of the errors of the output and of the gradients of query, key and value.
    """
    device, (_, heads, _, size) = query.device, query.shape
    generator = torch.Generator(device).manual_seed(0)  # leaves the global generator, and so the run, as it was
    q, k, v, outer = (
        torch.randn(1, number, sum(PROBE_LENGTHS), size, device=device, generator=generator).to(query.dtype)
        for number in (heads, num_key_heads, num_key_heads, heads)
    )
    attend = partial(
        kernel,
        cu_seqlens=row_bounds(PROBE_LENGTHS, device),
        max_seqlen=max(PROBE_LENGTHS),
        window=window,
        scale=scale,
    )
    exact = partial(_row_by_row, window=window, scale=scale)
    results = _with_gradients(attend, (q, k, v), outer)
    expected = _with_gradients(exact, (q.float(), k.float(), v.float()), outer.float())
    return float(torch.stack([(a - b).norm() / b.norm() for a, b in zip(results, expected, strict=True)]).max())


def _row_by_row(query: Tensor, key: Tensor, value: Tensor, window: Window, scale: float | None) -> Tensor:
    outputs = []
    for q, k, v in zip(*(tensor.split(PROBE_LENGTHS, 2) for tensor in (query, key, value)), strict=True):
        positions = torch.arange(q.shape[2], device=q.device)
        back = positions[:, None] - positions
        mask = (back >= 0) & (back <= (window[0] if window != CAUSAL else max(PROBE_LENGTHS)))
        outputs.append(F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True))
    return torch.cat(outputs, 2).transpose(1, 2)


@torch.enable_grad()  # models are probed under no_grad
def _with_gradients(attend: Callable[..., Tensor], inputs: Sequence[Tensor], outer: Tensor) -> list[Tensor]:
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    output = attend(*inputs)
    gradients = torch.autograd.grad(output, inputs, outer.transpose(1, 2))
    return [tensor.float() for tensor in (output.detach(), *gradients)]
