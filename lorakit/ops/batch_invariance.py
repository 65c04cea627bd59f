"""Compute a row to the same bits in any batch: for bfloat16 on the CPU, where few rows meet other kernels than many.

oneDNN and MKL choose the order of a sum by the number of rows: one row, fewer rows than threads, few multiplications.
In bfloat16 a changed last bit is 0.4 %, so it soon changes a token (docs/decisions/0077).
Invariant: products have a multiple of ``BatchSizes.height`` rows, and attention ``BatchSizes.width`` keys. Low-rank
updates are computed in float32, whose products sum such rows alike. In float32 and on GPUs nothing is changed.
"""

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorakit.ops._internals import attention_implementation, can_set_attention, has_bfloat16_products

SDPA: Final = "invariant_sdpa"
WIDTH_STEP: Final = 16
"""keys, because a vector register of float32 has 16 numbers at most; and new tokens of a row that has several"""
KEY_BLOCK: Final = 512  # keys that torch's attention on the CPU takes at a time
MKL_DEPTH: Final = 192
"""numbers that MKL sums at a time. Above it and below twice as many, it sums half of them at a time"""
MIN_QUERIES: Final = 4  # of a key head, from which on MKL has one kernel
MIN_MULTIPLICATIONS: Final = 16**3  # up to which torch multiplies without oneDNN


def is_height_dependent(x: Tensor) -> bool:
    """True if the bits of a row's product depend on the number of rows, unless that is a multiple of the height."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu"


def use_invariant_attention(model: nn.Module) -> None:
    """Attend by ``_attend`` if the model is one of bfloat16 on the CPU that attends by sdpa."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    is_sdpa = attention_implementation(model) == "sdpa" and can_set_attention(model)
    if not is_sdpa or not is_height_dependent(next(model.parameters())):
        return
    ALL_MASK_ATTENTION_FUNCTIONS.register(SDPA, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    ALL_ATTENTION_FUNCTIONS.register(SDPA, _attend)
    model.set_attn_implementation(SDPA)  # type: ignore[operator]


@dataclass(frozen=True)
class BatchSizes:
    """The sizes of a forward's batch."""

    height: int  # a power of two, of which the rows of a product (rows x new tokens of each) are a multiple; 1: of any

    @classmethod
    def of(cls, model: nn.Module) -> "BatchSizes":
        layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
        if not attention_implementation(model).endswith(SDPA) or not layers:
            return cls(1)
        # without such instructions oneDNN gives each thread some rows, and a single row has a kernel of its own
        height = 4 if has_bfloat16_products() else 2 * torch.get_num_threads()
        smallest = min(layer.weight.numel() for layer in layers)
        height = max(height, MIN_MULTIPLICATIONS // smallest + 1)
        return cls(1 << (height - 1).bit_length())

    def rows(self, num_rows: int, num_tokens: int) -> int:
        """Return the rows that a batch of these rows has, where each has so many new tokens."""
        return num_rows if num_tokens > 1 else _rounded_up(num_rows, self.height)

    def tokens(self, num_tokens: int) -> int:
        """Return the new tokens, with padding, of a row that has these."""
        step = 1 if self.height == 1 or num_tokens == 1 else max(self.height, WIDTH_STEP)
        return _rounded_up(num_tokens, step)

    def logits(self, num_rows: int) -> int:
        """Return the last tokens of each row whose logits are computed, so that the head's product has its height."""
        return self.height // math.gcd(num_rows, self.height)

    def width(self, num_keys: int) -> int:
        """Return the keys that attention reads for rows of up to so many: without a block that MKL sums by halves."""
        if self.height == 1:
            return num_keys
        width = _rounded_up(num_keys, WIDTH_STEP)
        last_block = width % KEY_BLOCK
        # where it has no such instructions, MKL sums up to 384 keys at a time on some, and so a full block by halves
        least = 2 * MKL_DEPTH if has_bfloat16_products() else KEY_BLOCK
        return width + least - last_block if MKL_DEPTH < last_block < least else width


def _rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **rest: Any
) -> tuple[Tensor, None]:
    """Attend as transformers' sdpa does; one new token of a row by ``MIN_QUERIES`` queries of a key head or more.

    query: (rows, heads, tokens, width). Rows after those of ``key`` only fill the batch: their output is 0.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    num_rows, num_heads, num_tokens, width = query.shape
    if num_tokens > 1 or attention_mask is None:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **rest)
    own_rows, key_heads = key.shape[:2]
    group = num_heads // key_heads  # queries of a key head
    queries = query[:own_rows].reshape(own_rows, key_heads, group, width)
    queries = F.pad(queries, (0, 0, 0, -group % MIN_QUERIES))
    attended = F.scaled_dot_product_attention(
        queries, key, value, attn_mask=attention_mask[:own_rows], scale=rest.get("scaling")
    )
    attended = attended[:, :, :group].reshape(own_rows, 1, num_heads, -1)
    return F.pad(attended, (0, 0, 0, 0, 0, 0, 0, num_rows - own_rows)), None
