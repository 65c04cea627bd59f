"""How A and B start: at random with B zero, or at a part of W that is taken off again.

A start at a part of W leaves W alone: the layer computes y + s (B A - B0 A0) x with fixed A0 = A and B0 = B, so that
the base is not written, can be quantised or in parts, and the patch is a plain LoRA patch of rank 2 r on it.
"""

import math
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from lorakit.lora.low_rank import nearest_low_rank

Factors = tuple[Tensor, Tensor]
"""A (r, in), B (out, r)"""


def gaussian(out_features: int, in_features: int, rank: int, g: torch.Generator) -> Factors:
    """A normal with standard deviation 1/r, B zero."""
    return torch.empty(rank, in_features).normal_(std=1 / rank, generator=g), torch.zeros(out_features, rank)


def kaiming(out_features: int, in_features: int, rank: int, g: torch.Generator) -> Factors:
    """A uniform within 1/sqrt(in), B zero."""
    A = torch.nn.init.kaiming_uniform_(torch.empty(rank, in_features), a=math.sqrt(5), generator=g)
    return A, torch.zeros(out_features, rank)


def pissa(W: Tensor, rank: int, s: float, seed: int) -> Factors:
    """s B A is the nearest matrix of rank r to W. Source: Meng et al. 2024 (arXiv 2404.02948), section 3.

    By random projections where W is large, which ``seed`` makes reproducible.
    """
    near = nearest_low_rank(W.float(), rank, seed).factors
    return near.A / math.sqrt(s), near.B / math.sqrt(s)


def olora(W: Tensor, rank: int, s: float, seed: int) -> Factors:
    """B the first r columns of Q, A the first r rows of R, of W = Q R. Source: Büyükakyüz 2024 (arXiv 2406.01775)."""
    Q, R = torch.linalg.qr(W.float())
    return R[:rank].contiguous(), Q[:, :rank].contiguous()


RANDOM: Final[Mapping[str, Callable[[int, int, int, torch.Generator], Factors]]] = {
    "gaussian": gaussian, "kaiming": kaiming,
}  # fmt: skip
FROM_WEIGHT: Final[Mapping[str, Callable[[Tensor, int, float, int], Factors]]] = {"pissa": pissa, "olora": olora}
INITS: Final = (*RANDOM, *FROM_WEIGHT)


def init_factors(
    how: str, out_features: int, in_features: int, rank: int, s: float, seed: int, W: Callable[[], Tensor]
) -> dict[str, Tensor]:
    """The float32 tensors an adapter starts with, by name; ``W`` is asked only by a start that needs it.

    ``seed`` is the layer's own, so that the start does not depend on device, order or number of processes. On the
    meta device only shapes are right.
    """
    if how in RANDOM:
        A, B = RANDOM[how](out_features, in_features, rank, torch.Generator().manual_seed(seed))
        return {"lora_A": A, "lora_B": B}
    weight = W()
    if weight.is_meta:
        A, B = (torch.empty(shape, device="meta") for shape in ((rank, in_features), (out_features, rank)))
    else:
        A, B = FROM_WEIGHT[how](weight, rank, s, seed)
    return {"lora_A": A, "lora_B": B, "lora_A0": A.clone(), "lora_B0": B.clone()}
