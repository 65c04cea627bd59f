"""Attend to packed rows one by one, or all in one kernel call: rows never mix, and no mask over a full line is formed.

It wraps a transformers model's own attention function, through transformers' attention and mask interfaces. A row's
mask is the model's own rule (causal, a sliding window, chunks) on that row alone, computed once per pass for all
layers. Under sdpa a causal mask is not formed at all, because sdpa computes causality itself.

The kernel is torch's for rows of variable lengths. It takes 16-bit heads of some sizes on GPUs that compute in
bfloat16; all others attend row by row (decision 0019).
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from lorakit.ops._internals import attention_function, attention_implementation, can_set_attention

Window = tuple[int, int]  # how many tokens before and after itself a token attends to; -1: all of its row
CAUSAL: Final = (-1, 0)
DTYPES: Final = (torch.bfloat16, torch.float16)
MAX_HEAD_SIZE: Final = 256
AMPERE: Final = (8, 0)  # compute capability of the oldest GPUs that the kernel runs on
UNSUPPORTED_ARGUMENTS: Final = ("softcap", "s_aux", "position_bias", "cache")
"""arguments that transformers may pass to attention, and that change the result in ways the kernel has not"""
PREFIX: Final = "rows_"
SUPPORTED: Final = ("sdpa", "eager")
BLOCK: Final = 512
"""queries whose mask is compared with causality at a time: memory grows with BLOCK times the row's tokens"""
MaskFunction = Callable[..., Tensor | None]
"""transformers' mask interface: arguments by name -> mask (1, 1, queries, keys), or None where none is needed"""
Heads = tuple[Tensor, Tensor, Tensor]  # queries, keys and values, each (1, heads, tokens, size)
AttendRows = Callable[[nn.Module, Heads, "Masks"], Tensor]
"""(attention module, heads of a full line, its masks) -> output (1, tokens, heads, size)"""


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
        return self._function(
            *heads, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale=scale, window_size=window, **gqa
        )[None]


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


@final
class RowLengths:
    """The tokens of each row of a packed line, passed to a model's forward as ``row_lengths``."""

    def __init__(self, lengths: Sequence[int], kernel: VarlenKernel | None = None, shared: Sequence[int] = ()) -> None:
        self.lengths = tuple(lengths)
        self.shared = tuple(shared) or (0,) * len(self.lengths)
        """how many tokens before its own a row has in common with the last row before it that shares none, whose keys
        and values these are; such rows are attended to one by one"""
        self.kernel = kernel  # attends to all rows in one call; None to attend row by row
        self.was_used = False  # True once the model's forward has passed them on to its attention
        self.wrapper: Callable[[AttendRows, nn.Module, Heads, Masks, RowLengths], Tensor] | None = None
        """attends in place of the rows' own attention, which it is given, where the model is called with other tokens
        or heads than the full line's"""


def enable_packed_attention(model: nn.Module) -> bool:
    """Switch a model to packed attention. False if its attention does not go through transformers' interface."""
    if not can_pack_attention(model):
        return False
    inner = attention_implementation(model).removeprefix(PREFIX)
    _register(inner)
    model.set_attn_implementation(PREFIX + inner)  # type: ignore[operator]
    return True


def can_pack_attention(model: nn.Module) -> bool:
    """True if a model's attention goes through transformers' interface, in a form that packed attention wraps."""
    return attention_implementation(model).removeprefix(PREFIX) in SUPPORTED and can_set_attention(model)


def disable_packed_attention(model: nn.Module) -> None:
    """Switch a model back to the attention it had before `enable_packed_attention`."""
    model.set_attn_implementation(attention_implementation(model).removeprefix(PREFIX))  # type: ignore[operator]


def _register(inner: str) -> None:
    """Register an attention function and a mask function that wrap those called `inner`."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    inner_mask = ALL_MASK_ATTENTION_FUNCTIONS[inner]

    def mask(**arguments: Any) -> Any:
        one_line = arguments["batch_size"] == 1 and arguments["q_length"] == arguments["kv_length"]
        if one_line and arguments.get("attention_mask") is None:
            return Masks(inner_mask, arguments, skip_causal=inner == "sdpa")
        return inner_mask(**arguments)

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        row_lengths: RowLengths | None = None,
        **rest: Any,
    ) -> Any:
        attention = attention_function(module, inner)
        if not isinstance(attention_mask, Masks):
            return attention(module, query, key, value, attention_mask, **rest)
        if row_lengths is None:
            return attention(module, query, key, value, attention_mask.line, **rest)
        rows = row_lengths
        rows.was_used = True

        def attend_rows(module: nn.Module, heads: Heads, masks: Masks) -> Tensor:
            kernel = rows.kernel
            if kernel is not None and not any(rows.shared) and kernel.supports(module, *heads, rest):
                window = masks.window(rows.lengths)
                if window is not None:
                    bounds = row_bounds(rows.lengths, heads[0].device)
                    return kernel(*heads, bounds, max(rows.lengths), window, rest.get("scaling"))
            return _one_by_one(lambda *row: attention(module, *row, **rest)[0], heads, masks.for_rows(rows), rows)

        if rows.wrapper is not None:
            return rows.wrapper(attend_rows, module, (query, key, value), attention_mask, rows), None
        return attend_rows(module, (query, key, value), attention_mask), None

    ALL_MASK_ATTENTION_FUNCTIONS.register(PREFIX + inner, mask)
    # not compiled, because a compiler would compile it anew for every combination of row lengths
    ALL_ATTENTION_FUNCTIONS.register(PREFIX + inner, torch.compiler.disable(attend))


def _one_by_one(
    attend: Callable[..., Tensor], heads: Heads, masks: Sequence[Tensor | None], rows: RowLengths
) -> Tensor:
    """Return the outputs of all rows, (1, tokens, heads, size). attend: (queries, keys, values, mask) of one row."""
    outputs = []
    first: tuple[Tensor, ...] = ()  # keys and values of the last row that shares no tokens
    parts = (part.split(rows.lengths, dim=2) for part in heads)
    for shared, mask, query, *own in zip(rows.shared, masks, *parts, strict=True):
        if shared:
            own = [torch.cat([one[:, :, :shared], other], dim=2) for one, other in zip(first, own, strict=True)]
        else:
            first = tuple(own)
        outputs.append(attend(query, *own, mask))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


@final
class Masks:
    """A model's mask rule for one pass over a line; each mask is computed on first use."""

    def __init__(self, mask: MaskFunction, arguments: Mapping[str, Any], *, skip_causal: bool) -> None:
        self._mask = mask
        self._arguments = arguments  # of the model's mask call
        self._skip_causal = skip_causal  # return None for a causal mask, which sdpa computes itself
        self._rows: tuple[Tensor | None, ...] | None = None
        self._window: tuple[Window | None] | None = None  # (None,): computed, and there is no window
        self._of_full_line: Masks | None = None

    def of_full_line(self, lengths: Sequence[int]) -> "Masks":
        """Return the full line's masks for a part of it, where only causality and the window are known."""
        if self._of_full_line is None:
            window = self._arguments.get("local_size")

            def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                causal = key <= query
                return causal if window is None else causal & (key > query - window)

            total = sum(lengths)
            arguments = {**self._arguments, "mask_function": rule, "q_length": total, "kv_length": total}
            self._of_full_line = Masks(self._mask, arguments, skip_causal=self._skip_causal)
        return self._of_full_line

    @cached_property
    def line(self) -> Tensor | None:
        """The mask over the full line, for a call without row lengths."""
        return self._mask(**self._arguments)

    def for_rows(self, rows: RowLengths) -> tuple[Tensor | None, ...]:
        """Return the mask of each row; None for a causal one that attention computes itself."""
        if self._rows is None:
            spans = _row_spans(rows.lengths)
            skipped = [False] * len(spans)
            if self._skip_causal:
                causal = self._are_causal(spans)
                # one read from the device where all rows are causal, as most rules have it, else one for each row
                skipped = [True] * len(spans) if causal.all() else [bool(one) for one in causal]
            masks = []
            for skip, shared, (start, length) in zip(skipped, rows.shared, spans, strict=True):
                if shared:  # whose keys lie in another row, so the model's own rule hides them
                    masks.append(self.of_full_line(rows.lengths)._mask_of_row(0, length, shared))
                else:
                    masks.append(None if skip else self._mask_of_row(start, length))
            self._rows = tuple(masks)
        return self._rows

    def window(self, lengths: Sequence[int]) -> Window | None:
        """Return the window of a kernel with these masks; None if there is none. Reads one number, once per pass."""
        if self._window is None:
            size = self._arguments.get("local_size")
            size = None if size is None or max(lengths) <= size else int(size)
            is_causal = self._skip_causal and bool(self._are_causal(_row_spans(lengths), size).all())
            self._window = ((CAUSAL if size is None else (size - 1, 0)) if is_causal else None,)
        return self._window[0]

    def _mask_of_row(self, start: int, length: int, shared: int = 0) -> Tensor | None:
        """Return the mask of the tokens after ``shared`` ones, as if all were a row that starts there."""
        span = {"q_length": length, "kv_length": shared + length, "q_offset": start + shared, "kv_offset": start}
        mask = self._mask(**{**self._arguments, **span, "allow_is_causal_skip": False})
        if mask is None or mask.dtype != torch.bool:
            return mask
        # as numbers once per pass, because sdpa would convert a boolean mask in every layer
        dtype = self._arguments.get("dtype", torch.float32)
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)

    def _are_causal(self, rows: Sequence[tuple[int, int]], window: int | None = None) -> Tensor:
        """Return for each row, (rows,), if its tokens attend to the row, or its last `window` tokens, up to themselves.

        The model's rule is evaluated, not its name, because models combine rules.
        """
        if self._arguments.get("use_vmap"):  # a rule for single indices, which cannot be evaluated on blocks
            return torch.zeros(len(rows), dtype=torch.bool)
        rule = self._arguments["mask_function"]
        device = self._arguments["device"]
        # (1, 1) and not a scalar, because torch reads a scalar index back from the device
        zero = torch.zeros(1, 1, dtype=torch.long, device=device)
        agreed = []
        for start, length in rows:
            keys = torch.arange(start, start + length, device=device)
            blocks = []
            for queries in keys.split(BLOCK):
                q = queries[:, None]
                k = keys[None, :]
                expected = k <= q if window is None else (k <= q) & (k > q - window)
                blocks.append((rule(zero, zero, q, k) == expected).all())
            agreed.append(torch.stack(blocks).all())
        return torch.stack(agreed)


def _row_spans(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return (start, tokens) of each row."""
    return list(zip(accumulate(lengths[:-1], initial=0), lengths, strict=True))
