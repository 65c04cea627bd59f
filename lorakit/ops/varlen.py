"""Attend to all rows of a packed line in one call of torch's variable-length kernel.

It takes 16-bit heads of some sizes on GPUs that compute in bfloat16; all others attend row by row (decision 0019).
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final, final

import torch
from torch import Tensor, nn

Window = tuple[int, int]  # how many tokens before and after itself a token attends to; -1: all of its row
CAUSAL: Final = (-1, 0)
DTYPES: Final = (torch.bfloat16, torch.float16)
MAX_HEAD_SIZE: Final = 256
AMPERE: Final = (8, 0)  # compute capability of the oldest GPUs that the kernel runs on
UNSUPPORTED_ARGUMENTS: Final = ("softcap", "s_aux", "position_bias", "cache")
"""arguments that transformers may pass to attention, and that change the result in ways the kernel has not"""


@final
class VarlenKernel:
    """A function with the arguments of torch's ``varlen_attn``, for queries, keys and values of one of `dtypes`."""

    def __init__(self, function: Callable[..., Any], dtypes: Sequence[torch.dtype] = DTYPES) -> None:
        self._function = function
        self._dtypes = dtypes
        self.num_calls = 0
        """calls so far; 0 after a forward pass: no attention of the model is of a kind that the kernel takes"""
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
        asks_more = arguments.get("dropout") or any(arguments.get(name) is not None for name in UNSUPPORTED_ARGUMENTS)
        return fits and typed and causal and not asks_more

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, window: Window, scale: float | None
    ) -> Tensor:
        """Attend within each row: queries, keys and values (1, heads, tokens, size) -> (1, tokens, heads, size)."""
        self.num_calls += 1
        gqa = {"enable_gqa": True} if self._has_gqa else {}
        if not gqa:  # older versions of torch need one key head for each query head
            k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
        heads = (tensor[0].transpose(0, 1) for tensor in (q, k, v))
        output: Tensor = self._function(
            *heads, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale=scale, window_size=window, **gqa
        )
        return output[None]


def varlen_kernel(device: torch.device) -> VarlenKernel | None:
    """Return torch's kernel; None on a device without one."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < AMPERE:
        return None
    from torch.nn.attention.varlen import varlen_attn  # here, because the import takes a second

    return VarlenKernel(varlen_attn)


@lru_cache(1)  # because every layer asks for those of one line
def row_bounds(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return where each row starts, and where the last one ends: (rows + 1,) int32. Does not wait for the device."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)
