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
MAGNITUDE: Final = "lora_magnitude_vector"


@dataclass(frozen=True)
class LayerInputs:
    """What a method sees of a layer in one forward pass. x' is x after dropout."""

    y: Tensor
    """x W^T + b"""
    product: Callable[[], Tensor]
    """() -> x' W^T, without b"""
    shrink: Callable[[Tensor], Tensor]
    """A -> x' A^T"""
    shrink_without_dropout: Callable[[Tensor], Tensor]
    """A -> x A^T"""
    weight_times: Callable[[Tensor], Tensor]
    """A -> W A^T (out, r), without gradient"""


@dataclass(frozen=True)
class Method:
    """The functions that define a method.

    An untrained adapter must change nothing, and ``merge`` must agree with ``apply``.
    """

    scale: Callable[[float, int], float]
    """(alpha, r) -> s"""
    apply: Callable[[LayerInputs, Tensors, float], Tensor]
    """(what there is to see, tensors, s) -> adapted y"""
    merge: Callable[[Tensor, Tensors, float], Tensor]
    """(W, or some of its rows, in float64; tensors, s) -> the same of the adapted W; may use W's memory"""
    extra_tensors: Callable[[Tensor], dict[str, Tensor]] | None = None
    """W in floats -> float32 tensors beside A and B that depend on it; those in ``derived`` never change"""
    fixed: tuple[str, ...] = ()
    """tensors that do not learn"""
    derived: tuple[str, ...] = ()
    """fixed tensors that follow from W, so that no file holds them"""
    additive: bool = True
    """whether it adds the same to W whatever W is"""
    low_rank: bool = True
    """whether ``apply`` is y + s (x' A^T) B^T and nothing else"""


def add_low_rank(inputs: LayerInputs, tensors: Tensors, s: float) -> Tensor:
    """y + s (x' A^T) B^T, computed in y's dtype; less s (x A0^T) B0^T when the adapter began at A0 and B0.

    The tensors are cast to x rather than x to the tensors: they are small, and x would be copied at every layer.
    """
    dtype = inputs.y.dtype
    delta = F.linear(inputs.shrink(tensors["lora_A"].to(dtype)), tensors["lora_B"].to(dtype))
    if "lora_A0" in tensors:
        delta = delta - F.linear(
            inputs.shrink_without_dropout(tensors["lora_A0"].to(dtype)), tensors["lora_B0"].to(dtype)
        )
    return torch.add(inputs.y, delta, alpha=s)


def merge_low_rank(W: Tensor, tensors: Tensors, s: float) -> Tensor:
    """W + s B A for a float64 W, in its memory; rounding to the stored dtype is left to who stores it.

    In bfloat16 every entry with |s B A| < 2**-9 |W| is lost in that rounding. Source: Hu et al. 2021, section 4.1.
    """
    W = W.addmm_(tensors["lora_B"].double(), tensors["lora_A"].double(), alpha=s)
    if "lora_A0" in tensors:
        W = W.addmm_(tensors["lora_B0"].double(), tensors["lora_A0"].double(), alpha=-s)
    return W


def measure_rows(W: Tensor) -> dict[str, Tensor]:
    """The lengths of W's rows, once to learn and once to stay, summed in float64."""
    norm = torch.linalg.vector_norm(W, dim=1, dtype=torch.float64).float()
    return {MAGNITUDE: norm, "weight_norm": norm.clone()}


def apply_dora(inputs: LayerInputs, tensors: Tensors, s: float) -> Tensor:
    """b + (m / |V|) x V^T with V = W + s B A, m the learnt length of each row, |V| without gradient.

    |V|^2 = |W|^2 + 2 s (W A^T . B) + s^2 (B A A^T . B) row by row, so V is never formed. With dropout the change alone
    sees x', as in PEFT. Source: Liu et al. 2024 (arXiv 2402.09353), equation 5 and section 4.3.
    """
    dtype = inputs.y.dtype
    A, B = tensors["lora_A"], tensors["lora_B"]
    gain = dora_gain(tensors, inputs.weight_times, s)
    delta = F.linear(inputs.shrink(A.to(dtype)), B.to(dtype))
    return inputs.y + (gain - 1).to(dtype) * inputs.product() + (gain * s).to(dtype) * delta


def dora_gain(tensors: Tensors, weight_times: Callable[[Tensor], Tensor], s: float) -> Tensor:
    """m / |V| (out,) in float32; 1 where V's row is zero. ``times``: A -> W A^T."""
    with torch.no_grad():
        A, B = tensors["lora_A"].float(), tensors["lora_B"].float()
        inner = (weight_times(A).float() * B).sum(1)
        squares = ((B @ (A @ A.T)) * B).sum(1)
        norm = (tensors["weight_norm"].square() + 2 * s * inner + s * s * squares).clamp(min=0).sqrt()
    return row_gain(tensors[MAGNITUDE], norm)


def merge_dora(W: Tensor, tensors: Tensors, s: float) -> Tensor:
    """(m / |V|) V with V = W + s B A, for whole rows of W in float64."""
    V = merge_low_rank(W, tensors, s)
    return V.mul_(row_gain(tensors[MAGNITUDE].double(), torch.linalg.vector_norm(V, dim=1))[:, None])


def row_gain(magnitude: Tensor, norm: Tensor) -> Tensor:
    """m / |V| of each row (out,); 1 where V's row is zero."""
    zero = norm == 0
    return torch.where(zero, 1.0, magnitude / norm.masked_fill(zero, 1.0))


LORA = Method(lambda alpha, r: alpha / r, add_low_rank, merge_low_rank)
RSLORA = replace(LORA, scale=lambda alpha, r: alpha / math.sqrt(r))  # Kalajdzievski 2023 (arXiv 2312.03732)
LORA_FA = replace(LORA, fixed=("lora_A",))  # Zhang et al. 2023 (arXiv 2308.03303)
DORA = replace(
    LORA, apply=apply_dora, merge=merge_dora, extra_tensors=measure_rows, fixed=("weight_norm",), derived=("weight_norm",),
    additive=False, low_rank=False,
)  # fmt: skip
RSDORA = replace(DORA, scale=RSLORA.scale)

METHODS: Final[Mapping[str, Method]] = {
    "lora": LORA, "rslora": RSLORA, "lora_fa": LORA_FA, "dora": DORA, "rsdora": RSDORA,
}  # fmt: skip
