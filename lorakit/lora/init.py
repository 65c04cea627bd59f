"""Initialise A and B: A at random with B zero, or (PiSSA, OLoRA) both as a low-rank part of W.

W and the initial output must stay the same. The layer computes y + s (B A - B0 A0) x with fixed A0 = A and
B0 = B, so the base is not written and may be quantised or sharded. The patch is a plain LoRA patch of rank 2 r on that
base (decision 0017).
"""

import math
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from lorakit.lora.low_rank import nearest_low_rank

Factors = tuple[Tensor, Tensor]  # A (r, in), B (out, r)


def gaussian(in_features: int, rank: int, generator: torch.Generator) -> Tensor:
    """Return A normal with standard deviation 1/r."""
    return torch.empty(rank, in_features).normal_(std=1 / rank, generator=generator)


def kaiming(in_features: int, rank: int, generator: torch.Generator) -> Tensor:
    """Return A uniform within 1/sqrt(in)."""
    # a = sqrt(5) gives these bounds; it is what nn.Linear and PEFT pass
    return torch.nn.init.kaiming_uniform_(torch.empty(rank, in_features), a=math.sqrt(5), generator=generator)


def pissa(W: Tensor, rank: int, s: float, seed: int) -> Factors:
    """Return A and B with s B A the matrix of rank r nearest to W. Source: Meng et al. 2024 (arXiv 2404.02948), 3."""
    near = nearest_low_rank(W.float(), rank, seed).factors
    return near.A / math.sqrt(s), near.B / math.sqrt(s)


def olora(W: Tensor, rank: int, s: float, seed: int) -> Factors:
    """Return r rows of R as A and r columns of Q as B, where W = Q R. Büyükakyüz 2024 (arXiv 2406.01775)."""
    Q, R = torch.linalg.qr(W.float())
    return R[:rank].contiguous(), Q[:, :rank].contiguous()


RANDOM: Final[Mapping[str, Callable[[int, int, torch.Generator], Tensor]]] = {"gaussian": gaussian, "kaiming": kaiming}
FROM_WEIGHT: Final[Mapping[str, Callable[[Tensor, int, float, int], Factors]]] = {"pissa": pissa, "olora": olora}
INITS: Final = (*RANDOM, *FROM_WEIGHT)


def init_factors(
    init: str, out_features: int, in_features: int, rank: int, s: float, seed: int, W: Callable[[], Tensor]
) -> dict[str, Tensor]:
    """Return the float32 tensors that an adapter starts with, by name. W: called only by an init that needs it.

    With the meta device as torch's default, or a W there, the tensors have shapes only.
    """
    on_meta = torch.get_default_device().type == "meta"
    if init in RANDOM and not on_meta:
        A = RANDOM[init](in_features, rank, torch.Generator().manual_seed(seed))
        B = torch.zeros(out_features, rank)
    elif on_meta or (weight := W()).is_meta:
        A, B = (torch.empty(shape, device="meta") for shape in ((rank, in_features), (out_features, rank)))
    else:
        A, B = FROM_WEIGHT[init](weight, rank, s, seed)
    factors = {"lora_A": A, "lora_B": B}
    return factors if init in RANDOM else factors | {"lora_A0": A.clone(), "lora_B0": B.clone()}
