"""Packed rows attend row by row, or all in one call: they never meet, and no mask over the whole line is formed.

It goes around the model's own attention function, through transformers' interfaces. A row's mask is the model's own
rule (causal, a sliding window, chunks) on that row alone, made once per pass for all layers; a causal one is left out.
"""

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from lorakit.ops.varlen import CAUSAL, KernelProbe, VarlenKernel, Window, row_bounds

PREFIX: Final = "rows_"
SUPPORTED: Final = ("sdpa", "eager")
BLOCK: Final = 512  # queries whose mask is looked at together

MaskOf = Callable[..., Tensor | None]
"""transformers' mask interface"""


@final
class RowLengths:
    """The tokens of each row of a packed line, handed to a model's forward as ``row_lengths``.

    ``reached``: whether the model has handed them on to its attention. ``kernel``: what may attend to all in one call.
    """

    def __init__(self, lengths: Sequence[int], kernel: VarlenKernel | KernelProbe | None = None) -> None:
        self.lengths, self.was_used, self.kernel = tuple(lengths), False, kernel
        self._bounds: Tensor | None = None

    def cu_seqlens(self, device: torch.device) -> Tensor:
        """Their ``row_bounds``, made once for all layers."""
        if self._bounds is None:
            self._bounds = row_bounds(self.lengths, device)
        return self._bounds


def enable_packed_attention(model: nn.Module) -> bool:
    """Switch a model to it; False when its attention does not go through transformers' interface."""
    inner = getattr(model.config, "_attn_implementation", None)
    switches = getattr(model, "_can_set_attn_implementation", None)
    if inner not in SUPPORTED or switches is None or not switches():
        return False
    _register(inner)
    model.set_attn_implementation(PREFIX + inner)  # type: ignore[operator]
    return True


def disable_packed_attention(model: nn.Module) -> None:
    """Undo ``enable_packed_attention``."""
    now = model.config._attn_implementation  # type: ignore[union-attr]
    model.set_attn_implementation(now.removeprefix(PREFIX))  # type: ignore[operator, union-attr]


def _register(inner: str) -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    mask_of, functions = ALL_MASK_ATTENTION_FUNCTIONS[inner], ALL_ATTENTION_FUNCTIONS

    def masks(**asked: Any) -> Any:
        one_line = asked["batch_size"] == 1 and asked["q_length"] == asked["kv_length"]
        if one_line and asked.get("attention_mask") is None:
            return Masks(mask_of, asked, leaves_out_causal=inner == "sdpa")
        return mask_of(**asked)

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
        row_lengths: RowLengths | None = None, **rest: Any,
    ) -> Any:  # fmt: skip
        # a model that cannot use sdpa has a function of its own beside its attention
        attention = functions.get(inner) or sys.modules[type(module).__module__].eager_attention_forward
        if not isinstance(attention_mask, Masks):
            return attention(module, query, key, value, attention_mask, **rest)
        if row_lengths is None:
            return attention(module, query, key, value, attention_mask.of_the_line(), **rest)
        row_lengths.was_used = True
        if (made := _varlen_attention(module, (query, key, value), attention_mask, row_lengths, rest)) is not None:
            return made, None
        lengths = row_lengths.lengths
        parts = (tensor.split(lengths, dim=2) for tensor in (query, key, value))
        rows = zip(*parts, attention_mask.of_rows(lengths), strict=True)
        outputs = [attention(module, *row, **rest)[0] for row in rows]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), None

    ALL_MASK_ATTENTION_FUNCTIONS.register(PREFIX + inner, masks)
    functions.register(PREFIX + inner, torch.compiler.disable(attend))  # it goes by the lengths of rows


def _varlen_attention(
    module: nn.Module, heads: tuple[Tensor, Tensor, Tensor], masks: "Masks", rows: RowLengths, asked: Mapping[str, Any]
) -> Tensor | None:
    """The output (1, tokens, heads, size) of all rows by their kernel; None where they are to attend one by one."""
    if rows.kernel is None or not rows.kernel.supports(module, *heads, asked):
        return None
    if (window := masks.window(rows.lengths)) is None:
        return None
    return rows.kernel(*heads, rows.cu_seqlens(heads[0].device), max(rows.lengths), window, asked.get("scaling"))


@final
class Masks:
    """A model's mask rule for one pass over a line, and the masks made by it when they are first asked for."""

    def __init__(self, mask_of: MaskOf, asked: Mapping[str, Any], *, leaves_out_causal: bool) -> None:
        self._mask_of, self._asked, self._leaves_out_causal = mask_of, asked, leaves_out_causal
        self._rows: tuple[Tensor | None, ...] | None = None
        self._line: tuple[Tensor | None] | None = None
        self._window: tuple[Window | None] | None = None

    def of_the_line(self) -> Tensor | None:
        """The mask over the whole line, where nobody says which tokens are a row."""
        self._line = self._line or (self._mask_of(**self._asked),)
        return self._line[0]

    def of_rows(self, lengths: Sequence[int]) -> tuple[Tensor | None, ...]:
        """The mask of each row; None where it is causal and attention can do that by itself."""
        if self._rows is None:
            self._rows = tuple(self._of_row(*row) for row in _places(lengths))
        return self._rows

    def window(self, lengths: Sequence[int]) -> Window | None:
        """What every token meets of its own row by the rule, when that is causality, perhaps within a window.

        Reads back one number from the device, once.
        """
        if self._window is None:
            size = self._asked.get("local_size")
            size = None if size is None or max(lengths) <= size else int(size)
            found = self._leaves_out_causal and self._is_causal(_places(lengths), size)
            self._window = ((CAUSAL if size is None else (size - 1, 0)) if found else None,)
        return self._window[0]

    def _of_row(self, start: int, length: int) -> Tensor | None:
        if self._leaves_out_causal and self._is_causal([(start, length)]):
            return None
        place = {"q_length": length, "kv_length": length, "q_offset": start, "kv_offset": start}
        mask = self._mask_of(**{**self._asked, **place, "allow_is_causal_skip": False})
        if mask is None or mask.dtype != torch.bool:
            return mask
        dtype = self._asked.get("dtype", torch.float32)  # as numbers once, rather than once in every layer
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)

    def _is_causal(self, rows: Iterable[tuple[int, int]], window: int | None = None) -> bool:
        """Whether every token of these rows meets all of its row up to itself, or the last ``window``, and no other."""
        if self._asked.get("use_vmap"):
            return False  # a rule that cannot be asked in blocks
        rule, device = self._asked["mask_function"], self._asked["device"]
        zero = torch.zeros((), dtype=torch.long, device=device)
        agreed = []
        for start, length in rows:
            keys = torch.arange(start, start + length, device=device)
            for queries in keys.split(BLOCK):
                q, k = queries[:, None], keys[None, :]
                expected = k <= q if window is None else (k <= q) & (k > q - window)
                agreed.append((rule(zero, zero, q, k) == expected).all())
        return bool(torch.stack(agreed).all())


def _places(lengths: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Where each row begins, and its tokens."""
    return zip(accumulate(lengths[:-1], initial=0), lengths, strict=True)
