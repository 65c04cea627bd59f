"""How an adapter changes a linear layer: one row of pure functions per method.

Letters as in Hu et al. 2021 (arXiv 2106.09685): x (..., in), W (out, in), A (r, in), B (out, r), s the scale.
A new method is a row in METHODS; the laws in tests/test_laws.py run over the whole table.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = Mapping[str, Tensor]
INITS: Final = ("gaussian", "kaiming")


@dataclass(frozen=True)
class Method:
    """The four functions that define a method.

    An untrained adapter (``init``) must change nothing, and ``merge`` must agree with ``apply``.
    """

    scale: Callable[[float, int], float]
    """(alpha, r) -> s"""
    init: Callable[[int, int, int, str, torch.Generator], dict[str, Tensor]]
    """(out, in, r, how A starts, generator) -> float32 tensors by name"""
    apply: Callable[[Tensor, Tensor, Tensors, float], Tensor]
    """(x, y = x W^T + b, tensors, s) -> adapted y"""
    merge: Callable[[Tensor, Tensors, float], Tensor]
    """(W or some of its rows in float64, tensors, s) -> the same of the adapted W; may use W's memory"""


def random_a_zero_b(out_features: int, in_features: int, rank: int, how: str, g: torch.Generator) -> dict[str, Tensor]:
    """A (r, in) random, B (out, r) zero, so that step 0 reproduces the base exactly.

    ``how``: ``gaussian``, standard deviation 1/r; ``kaiming``, uniform within 1/sqrt(in). Both as PEFT has them.
    """
    A = torch.empty(rank, in_features)
    if how == "gaussian":
        A.normal_(std=1 / rank, generator=g)
    elif how == "kaiming":
        torch.nn.init.kaiming_uniform_(A, a=math.sqrt(5), generator=g)
    else:
        raise ValueError(f"init {how!r} is neither 'gaussian' nor 'kaiming'")
    return {"lora_A": A, "lora_B": torch.zeros(out_features, rank)}


def add_low_rank(x: Tensor, y: Tensor, tensors: Tensors, s: float) -> Tensor:
    """y + s (x A^T) B^T, computed in x's dtype.

    The tensors are cast to x rather than x to the tensors: they are small, and x would be copied at every layer.
    """
    A, B = tensors["lora_A"].to(x.dtype), tensors["lora_B"].to(x.dtype)
    return torch.add(y, F.linear(F.linear(x, A), B), alpha=s)


def merge_low_rank(W: Tensor, tensors: Tensors, s: float) -> Tensor:
    """W + s B A for a float64 W, in its memory; rounding to the stored dtype is left to who stores it.

    In bfloat16 every entry with |s B A| < 2**-9 |W| is lost in that rounding. Source: Hu et al. 2021, section 4.1.
    """
    return W.addmm_(tensors["lora_B"].double(), tensors["lora_A"].double(), alpha=s)


LORA = Method(lambda alpha, r: alpha / r, random_a_zero_b, add_low_rank, merge_low_rank)
RSLORA = replace(LORA, scale=lambda alpha, r: alpha / math.sqrt(r))  # Kalajdzievski 2023 (arXiv 2312.03732)

METHODS: Final[Mapping[str, Method]] = {"lora": LORA, "rslora": RSLORA}
