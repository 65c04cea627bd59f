"""All rows of a packed line attend in one call of torch's variable-length kernel, where it does what a model asks for.

A kernel is tried before a run relies on it: it must give the outputs and gradients that rows give one by one.
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
"""How many tokens before and after itself a token meets; -1: all of its row."""
CAUSAL: Final = (-1, 0)
NARROW: Final = (3, 0)
DTYPES: Final = (torch.bfloat16, torch.float16)
MAX_HEAD_SIZE: Final = 256
UNSUPPORTED_ARGUMENTS: Final = ("softcap", "s_aux", "position_bias", "cache")
"""What transformers may ask of attention that the kernel does not do."""
LENGTHS: Final = (130, 1, 200)  # rows to try it on: blocks of 64 or 128, and parts of one
TOLERANCE: Final = 0.03  # in norm; rounding to bfloat16 makes 0.007
UNASKED: Final = "does not take this model's attention, or its dtype"


@final
class VarlenKernel:
    """A function with the arguments of torch's ``varlen_attn``, for queries, keys and values of one of ``dtypes``."""

    def __init__(self, function: Callable[..., Any], dtypes: Sequence[torch.dtype] = DTYPES) -> None:
        self._function, self._dtypes = function, dtypes
        self._shares_keys = "enable_gqa" in inspect.signature(function).parameters

    def supports(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, asked: Mapping[str, Any]) -> bool:
        """Whether it takes heads (1, heads, tokens, size) like these, and is asked for no more than mask and scale."""
        size = query.shape[-1]
        fits = key.shape[-1] == value.shape[-1] == size <= MAX_HEAD_SIZE and size % 8 == 0
        typed = query.dtype == key.dtype == value.dtype and query.dtype in self._dtypes
        causal = asked.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        return (
            fits
            and typed
            and causal
            and not asked.get("dropout")
            and all(asked.get(n) is None for n in UNSUPPORTED_ARGUMENTS)
        )

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor,
        cu_seqlens: Tensor, max_seqlen: int, window: Window, scale: float | None,
    ) -> Tensor:  # fmt: skip
        """query (1, heads, tokens, size), key and value (1, key heads, tokens, size) -> (1, tokens, heads, size).

        bounds: of ``row_bounds``; longest: tokens of the longest row.
        """
        shared = {"enable_gqa": True} if self._shares_keys else {}
        if not shared:
            key, value = (part.repeat_interleave(query.shape[1] // key.shape[1], 1) for part in (key, value))
        q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
        made: Tensor = self._function(
            q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale=scale, window_size=window, **shared
        )
        return made[None]


@final
class KernelProbe:
    """In a kernel's place for one pass: runs it on what it is given and tries it on random rows; gives nothing back.

    ``problem``: why the kernel is not to be used; None once it gave what the rows give one by one.
    """

    def __init__(self, kernel: VarlenKernel) -> None:
        self.kernel, self.supports = kernel, kernel.supports
        self.problem: str | None = UNASKED

    def __call__(self, query: Tensor, key: Tensor, *asked: Any) -> None:
        """Arguments as a kernel's."""
        if self.problem not in (None, UNASKED):
            return
        try:
            self.kernel(query, key, *asked)
            offs = [_relative_error(self.kernel, query, key.shape[1], window, asked[-1]) for window in (CAUSAL, NARROW)]
            wrong = [off for off in offs if not off <= TOLERANCE]
            self.problem = f"is off by {wrong[0]:.1%} on this device" if wrong else None
        except (RuntimeError, TypeError, ValueError) as problem:
            self.problem = f"does not run on this device ({str(problem).partition(chr(10))[0]})"


def varlen_kernel(device: torch.device) -> VarlenKernel | None:
    """torch's kernel; None where a device has none, or an older torch one without scale and window."""
    if device.type != "cuda":
        return None
    from torch.nn.attention.varlen import varlen_attn  # takes a second

    takes = inspect.signature(varlen_attn).parameters
    return VarlenKernel(varlen_attn) if {"scale", "window_size"} <= takes.keys() else None


def row_bounds(lengths: Sequence[int], device: torch.device) -> Tensor:
    """(rows + 1), int32: where each row begins, and where the last ends. Nothing waits for the device."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)


def _relative_error(
    kernel: VarlenKernel, query: Tensor, num_key_heads: int, window: Window, scale: float | None
) -> float:
    """How far output and gradients on random rows are from float32 and one by one, the worst in norm; NaN if any is."""
    device, (_, heads, _, size) = query.device, query.shape
    drawn = torch.Generator(device).manual_seed(0)
    q, k, v, outer = (
        torch.randn(1, number, sum(LENGTHS), size, device=device, generator=drawn).to(query.dtype)
        for number in (heads, num_key_heads, num_key_heads, heads)
    )
    asked: Any = {
        "cu_seqlens": row_bounds(LENGTHS, device),
        "max_seqlen": max(LENGTHS),
        "window": window,
        "scale": scale,
    }
    found = _with_gradients(partial(kernel, **asked), (q, k, v), outer)
    expected = _with_gradients(
        partial(_one_by_one, window=window, scale=scale), (q.float(), k.float(), v.float()), outer.float()
    )
    return float(torch.stack([(a - b).norm() / b.norm() for a, b in zip(found, expected, strict=True)]).max())


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, window: Window, scale: float | None) -> Tensor:
    outputs = []
    for q, k, v in zip(*(part.split(LENGTHS, 2) for part in (query, key, value)), strict=True):
        places = torch.arange(q.shape[2], device=q.device)
        back = places[:, None] - places
        met = (back >= 0) & (back <= (window[0] if window != CAUSAL else max(LENGTHS)))
        outputs.append(F.scaled_dot_product_attention(q, k, v, met, scale=scale, enable_gqa=True))
    return torch.cat(outputs, 2).transpose(1, 2)


@torch.enable_grad()
def _with_gradients(attend: Callable[..., Tensor], given: Sequence[Tensor], outer: Tensor) -> list[Tensor]:
    given = [part.detach().requires_grad_() for part in given]
    made = attend(*given)
    return [part.float() for part in (made.detach(), *torch.autograd.grad(made, given, outer.transpose(1, 2)))]
