"""Low-rank matrices through their factors, and dense ones brought down to a rank: sums, norms, truncation.

Letters as in ``methods``: delta = s B A with B (out, r) and A (r, in). The global generator is left as it is.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from lorakit.errors import PatchError
from lorakit.lora.methods import Tensors

EXACT_SIZE: Final = 1024
"""up to this smaller side a dense matrix gets a full SVD"""
OVERSAMPLES: Final = 16
ITERATIONS: Final = 4
DOUBLE_ELEMENTS: Final = 1 << 24
"""up to this size a dense delta is float64, above it float32"""
Summand = tuple[Tensors, float]
"""(A and B, s): the summand s B A"""


@dataclass(frozen=True)
class LowRank:
    """The matrix B A, never formed unless asked for: B (out, r), A (r, in)."""

    B: Tensor
    A: Tensor

    @property
    def rank(self) -> int:
        return self.A.shape[0]

    def dense(self) -> Tensor:
        """B A (out, in)."""
        return self.B @ self.A

    def to(self, dtype: torch.dtype) -> "LowRank":
        return LowRank(self.B.to(dtype), self.A.to(dtype))


@dataclass(frozen=True)
class LowRankFit:
    """s B A as it is stored, for a matrix that was asked for."""

    factors: LowRank
    s: float
    size: float
    """Frobenius norm of what was asked for"""
    residual_norm: float
    """Frobenius norm of what s B A lacks, measured on float32 factors; 0 for ranks that just stand side by side"""


def low_rank(tensors: Tensors, s: float) -> LowRank:
    """s B A in float64, s in B.

    Raises:
        PatchError: the update holds more than A and B, so it is no product of two matrices.
    """
    if more := sorted(set(tensors) - {"lora_A", "lora_B"}):
        raise PatchError(f"an update with {', '.join(more)} is no product of two matrices; merge it into a base")
    return LowRank(tensors["lora_B"].double() * s, tensors["lora_A"].double())


def add_low_rank(parts: Sequence[LowRank]) -> LowRank:
    """The sum of all parts, exactly: their ranks side by side."""
    return LowRank(torch.cat([part.B for part in parts], dim=1), torch.cat([part.A for part in parts]))


def subtract_low_rank(one: LowRank, two: LowRank) -> LowRank:
    """one - two, exactly."""
    return add_low_rank([one, LowRank(-two.B, two.A)])


def inner(one: LowRank, two: LowRank) -> float:
    """<one, two> in the Frobenius sense: sum((B1^T B2) * (A1 A2^T))."""
    return float(((one.B.T @ two.B) * (one.A @ two.A.T)).sum())


def norm(matrix: LowRank) -> float:
    """The Frobenius norm of B A, from the triangles of B and A^T.

    Not from ``inner``, whose squares lose half of the digits where parts cancel: the norm of a difference is exact to
    rounding in the size of its parts.
    """
    R_B, R_A = torch.linalg.qr(matrix.B, mode="r")[1], torch.linalg.qr(matrix.A.T, mode="r")[1]
    return float(torch.linalg.matrix_norm(R_B @ R_A.T))


def truncated(matrix: LowRank, rank: int) -> LowRank:
    """The nearest matrix of at most ``rank``, as B = U sqrt(S), A = sqrt(S) V^T.

    QR of both factors, SVD of the small core: with B = Q_B R_B and A^T = Q_A R_A, B A = Q_B (R_B R_A^T) Q_A^T. Nearest
    in the Frobenius norm (Eckart and Young 1936).
    """
    Q_B, R_B = torch.linalg.qr(matrix.B)
    Q_A, R_A = torch.linalg.qr(matrix.A.T)
    U, S, Vh = torch.linalg.svd(R_B @ R_A.T, full_matrices=False)
    return _balanced(Q_B @ U, S, Vh @ Q_A.T, rank)


def nearest_low_rank(D: Tensor, rank: int, seed: int = 0) -> LowRankFit:
    """A float32 product of at most ``rank`` near the dense D (out, in), split as ``truncated`` does; s is 1.

    The nearest there is for small D. For large D and small rank by random projections (Halko et al. 2011, arXiv
    0909.4061, algorithms 4.4 and 5.1), which ``seed`` makes reproducible. What is left is measured on the dense matrix.
    """
    if min(D.shape) <= EXACT_SIZE or 4 * (rank + OVERSAMPLES) > min(D.shape):
        U, S, Vh = torch.linalg.svd(D, full_matrices=False)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            U, S, V = torch.svd_lowrank(D, q=rank + OVERSAMPLES, niter=ITERATIONS)
        Vh = V.T
    near = _balanced(U, S, Vh, rank).to(torch.float32)
    lacking = torch.addmm(D, near.B.to(D.dtype), near.A.to(D.dtype), alpha=-1)
    return LowRankFit(near, 1.0, float(torch.linalg.matrix_norm(D)), float(torch.linalg.matrix_norm(lacking)))


def sum_low_rank(parts: Sequence[Summand], rank: int) -> LowRankFit:
    """sum_i s_i B_i A_i: as it is when its ranks fit into ``rank``, else the nearest of that rank."""
    asked = add_low_rank([low_rank(*part) for part in parts])
    size = norm(asked)
    if asked.rank <= rank:
        return LowRankFit(*concatenated(parts), size, 0.0)
    near = truncated(asked, rank).to(torch.float32)
    return LowRankFit(near, 1.0, size, norm(subtract_low_rank(asked, near.to(torch.float64))))


def concatenated(parts: Sequence[Summand]) -> tuple[LowRank, float]:
    """(B and A, s) with s B A = sum_i s_i B_i A_i: their ranks side by side, as they are stored.

    Where all s_i are one positive number it becomes s, and the tensors keep their bits. Else s is 1: a B_i with s_i = 1
    keeps its bits, and any other is s_i B_i rounded once to float32.
    """
    scales = {s for _, s in parts}
    s = scales.pop() if len(scales) == 1 and min(scales) > 0 else 1.0
    B = [t["lora_B"] if own == s else (own * t["lora_B"].double()).to(torch.float32) for t, own in parts]
    return LowRank(torch.cat(B, dim=1), torch.cat([tensors["lora_A"] for tensors, _ in parts])), s


def sparsified(parts: Sequence[Summand], how: str, rank: int, density: float, seed: int) -> LowRankFit:
    """``ties`` or ``dare`` of the dense s_i B_i A_i, brought down to ``rank``."""
    num_elements = math.prod((parts[0][0]["lora_B"].shape[0], parts[0][0]["lora_A"].shape[1]))
    dtype = torch.float64 if num_elements <= DOUBLE_ELEMENTS else torch.float32
    return nearest_low_rank(
        SPARSIFIERS[how]([low_rank(*part).to(dtype).dense() for part in parts], density, seed), rank, seed
    )


def ties(deltas: Sequence[Tensor], density: float, seed: int = 0) -> Tensor:
    """Trim, elect, disjoint mean, entry by entry over deltas of one shape. Nothing in it is drawn with ``seed``.

    Each delta keeps its ``density`` largest entries by magnitude (and what ties with the smallest of them); the sign of
    an entry is that of the sum of what is left; the result is the mean over the deltas that have that sign there.
    Source: Yadav et al. 2023 (arXiv 2306.01708), algorithm 1.
    """
    kept = [_largest(delta, density) for delta in deltas]
    elected = sum(kept[1:], kept[0]).sign()
    total, count = torch.zeros_like(elected), torch.zeros_like(elected)
    for delta in kept:
        agrees = (delta.sign() == elected) & (elected != 0)
        total += delta * agrees
        count += agrees
    return total / count.clamp(min=1)


def dare(deltas: Sequence[Tensor], density: float, seed: int = 0) -> Tensor:
    """The sum of the deltas, of each of which an entry is kept with probability ``density`` and then divided by it.

    Source: Yu et al. 2023 (arXiv 2311.03099), section 3.2.
    """
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros_like(deltas[0])
    for delta in deltas:
        total += delta * (torch.rand(delta.shape, generator=generator) < density) / density
    return total


SPARSIFIERS: Final[Mapping[str, Callable[[Sequence[Tensor], float, int], Tensor]]] = {"ties": ties, "dare": dare}


def _largest(delta: Tensor, density: float) -> Tensor:
    """The delta with zeros in all but its largest entries."""
    count = max(1, round(density * delta.numel()))
    sizes = delta.abs()
    smallest = sizes.flatten().kthvalue(delta.numel() - count + 1).values
    return delta * (sizes >= smallest)


def _balanced(U: Tensor, S: Tensor, Vh: Tensor, rank: int) -> LowRank:
    root = S[:rank].sqrt()
    return LowRank((U[:, :rank] * root).contiguous(), (root[:, None] * Vh[:rank]).contiguous())
