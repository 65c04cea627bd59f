"""The settings of an adapter, and the factors that it starts with: A random and B zero, or both a low-rank part of W.

W and the initial output must stay the same. For PiSSA and OLoRA the layer computes y + s (B A - B0 A0) x with fixed
A0 = A and B0 = B, so the base is not written and may be quantised or sharded. The patch is a plain LoRA patch of rank
2 r on that base (decision 0017).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from lorakit.errors import TargetError, translate_error
from lorakit.files.patterns import check_expression
from lorakit.lora.low_rank import nearest_low_rank
from lorakit.lora.methods import METHODS, PLAIN

ALL_LINEAR: Final = "all-linear"
MLP: Final = "mlp"
ALL_EXPERTS: Final = "all-experts"
BIASES: Final = ("none", "lora_only", "all")
TIED_HEADS: Final = ("stop", "untie")
Patterns = str | tuple[str, ...]  # a regular expression for full module names, or names and dotted suffixes of names
Factors = tuple[Tensor, Tensor]  # A (r, in), B (out, r)


@dataclass(frozen=True)
class AdapterSpec:
    """Fields as in the recipe's ``adapter`` section; tokens are ids. Raises TargetError for an impossible value."""

    method: str = PLAIN
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: Patterns = ALL_LINEAR
    exclude: Patterns | None = None
    layers: tuple[int, ...] | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    init: str = "gaussian"
    target_parameters: Patterns = ()  # 3-D parameters of experts: ``all-experts``, or suffixes of their names
    bias: str = "none"  # trainable biases of the base: ``none``, ``lora_only`` or ``all``
    modules_to_save: tuple[str, ...] = ()  # modules that are trained in full, by name or suffix
    trainable_tokens: tuple[int, ...] = ()  # trainable rows of the embedding, by token id
    new_tokens: Mapping[str, int] = field(default_factory=dict)
    """text -> id of tokens that the base does not have: trainable rows of the embedding and of the head"""
    num_values: int = 0  # of a head of the adapter's own, beside the base's; 0: it has none
    tied_head: str = "stop"  # an adapter on a head or embedding that share a weight: ``stop``, or ``untie`` them

    def __post_init__(self) -> None:
        for name, known in (("method", METHODS), ("init", INITS), ("bias", BIASES), ("tied_head", TIED_HEADS)):
            value = getattr(self, name)
            if value not in known:
                raise TargetError(f"{name} is one of {', '.join(known)}; got {value!r}")
        ranks = [self.rank, *self.rank_pattern.values()]
        alphas = [self.alpha, *self.alpha_pattern.values()]
        if any(type(r) is not int or r < 1 for r in ranks) or any(not 1e-9 <= a < 1e9 for a in alphas):
            raise TargetError(f"ranks are whole numbers from 1, alphas from 1e-9 to 1e9; got {ranks}, {alphas}")
        if not 0 <= self.dropout < 1:
            raise TargetError(f"0 <= dropout < 1; got {self.dropout}")
        if not isinstance(self.new_tokens, Mapping):
            raise TargetError(f"new_tokens: text -> id in your tokenizer, which has them; got {self.new_tokens!r}")
        patterns = (pattern for pattern in (self.targets, self.exclude) if isinstance(pattern, str))
        for text in [*patterns, *self.rank_pattern, *self.alpha_pattern]:
            with translate_error(ValueError, TargetError, f"{text!r}"):
                check_expression(text)


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
