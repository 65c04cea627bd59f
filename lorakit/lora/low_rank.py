"""Low-rank matrices through their factors, and dense matrices approximated at a rank: sums, norms, truncation.

Letters as in `lora.methods`: a delta is s B A with B (out, r) and A (r, in). No function here changes torch's global
random generator.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from lorakit.errors import PatchError
from lorakit.lora.methods import Tensors

EXACT_SIZE: Final = 1024  # a dense matrix with a smaller side up to this gets a full SVD
OVERSAMPLES: Final = 16  # columns of the random projection beyond the rank
ITERATIONS: Final = 4  # power iterations of the random projection
DOUBLE_ELEMENTS: Final = 1 << 24  # dense deltas up to this many elements are float64, larger ones float32
Summand = tuple[Tensors, float]  # (lora_A and lora_B, s): the summand s B A


@dataclass(frozen=True)
class LowRank:
    """The matrix B A by its factors: B (out, r), A (r, in). Only `dense` forms the product."""

    B: Tensor
    A: Tensor

    @property
    def rank(self) -> int:
        return self.A.shape[0]

    def dense(self) -> Tensor:
        """Return B A, (out, in)."""
        return self.B @ self.A

    def to(self, dtype: torch.dtype) -> "LowRank":
        return LowRank(self.B.to(dtype), self.A.to(dtype))


@dataclass(frozen=True)
class LowRankFit:
    """An approximation s B A of a target matrix, as a patch stores it."""

    factors: LowRank
    s: float
    target_norm: float  # Frobenius norm of the target
    residual_norm: float
    """Frobenius norm of (target - s B A), measured on the float32 factors; 0 where the ranks were only concatenated"""


def relative_error(*fits: LowRankFit) -> float:
    """Return ||target - s B A|| / ||target|| over all fits together; 0 if every target is 0."""
    norm = math.hypot(*(fit.target_norm for fit in fits))
    return math.hypot(*(fit.residual_norm for fit in fits)) / norm if norm else 0.0


def low_rank(tensors: Tensors, s: float) -> LowRank:
    """Return s B A in float64, with s multiplied into B. Raises PatchError for an update of more than A and B."""
    if more := sorted(set(tensors) - {"lora_A", "lora_B"}):
        raise PatchError(f"an update with {', '.join(more)} is no product of two matrices; merge it into a base")
    return LowRank(tensors["lora_B"].double() * s, tensors["lora_A"].double())


def add_low_rank(terms: Sequence[LowRank]) -> LowRank:
    """Return the exact sum of all terms: their factors, concatenated along the ranks."""
    return LowRank(torch.cat([term.B for term in terms], dim=1), torch.cat([term.A for term in terms]))


def subtract_low_rank(one: LowRank, two: LowRank) -> LowRank:
    """Return one - two, exactly."""
    return add_low_rank([one, LowRank(-two.B, two.A)])


def inner_product(one: LowRank, two: LowRank) -> float:
    """Return the Frobenius inner product of two matrices: sum((B1^T B2) * (A1 A2^T))."""
    return float(((one.B.T @ two.B) * (one.A @ two.A.T)).sum())


def frobenius_norm(matrix: LowRank) -> float:
    """Return the Frobenius norm of B A, from the triangular factors of B and A^T.

    Not sqrt(inner_product(M, M)): its squares lose half of the digits where terms cancel, as in a norm of a difference.
    """
    R_B = torch.linalg.qr(matrix.B, mode="r")[1]
    R_A = torch.linalg.qr(matrix.A.T, mode="r")[1]
    return float(torch.linalg.matrix_norm(R_B @ R_A.T))


def truncated(matrix: LowRank, rank: int) -> LowRank:
    """Return the nearest matrix of rank at most `rank` (Eckart and Young 1936), as B = U sqrt(S), A = sqrt(S) V^T.

    With B = Q_B R_B and A^T = Q_A R_A, B A = Q_B (R_B R_A^T) Q_A^T: an SVD of the small core is enough.
    """
    Q_B, R_B = torch.linalg.qr(matrix.B)
    Q_A, R_A = torch.linalg.qr(matrix.A.T)
    U, S, Vh = torch.linalg.svd(R_B @ R_A.T, full_matrices=False)
    return _balanced(Q_B @ U, S, Vh @ Q_A.T, rank)


def nearest_low_rank(D: Tensor, rank: int, seed: int = 0) -> LowRankFit:
    """Return a float32 product of rank at most `rank` near the dense D (out, in), factored as by `truncated`; s is 1.

    A large D goes by random projections (Halko et al. 2011, arXiv 0909.4061, 4.4 and 5.1), reproducible by `seed`.
    """
    if min(D.shape) <= EXACT_SIZE or 4 * (rank + OVERSAMPLES) > min(D.shape):
        U, S, Vh = torch.linalg.svd(D, full_matrices=False)
    else:
        with torch.random.fork_rng(devices=[]):  # because svd_lowrank takes no generator
            torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which seeds every GPU's generator too
            U, S, V = torch.svd_lowrank(D, q=rank + OVERSAMPLES, niter=ITERATIONS)
        Vh = V.T
    near = _balanced(U, S, Vh, rank).to(torch.float32)
    residual = torch.addmm(D, near.B.to(D.dtype), near.A.to(D.dtype), alpha=-1)
    return LowRankFit(near, 1.0, float(torch.linalg.matrix_norm(D)), float(torch.linalg.matrix_norm(residual)))


def sum_low_rank(summands: Sequence[Summand], rank: int) -> LowRankFit:
    """Return sum_i s_i B_i A_i: exactly if the ranks add up to at most `rank`, else the nearest of that rank."""
    exact = add_low_rank([low_rank(*summand) for summand in summands])
    if exact.rank <= rank:  # a norm of few digits, beside which the error of other layers is told
        return LowRankFit(*concatenated(summands), math.sqrt(max(0.0, inner_product(exact, exact))), 0.0)
    near = truncated(exact, rank).to(torch.float32)
    error = frobenius_norm(subtract_low_rank(exact, near.to(torch.float64)))
    return LowRankFit(near, 1.0, frobenius_norm(exact), error)


def concatenated(summands: Sequence[Summand]) -> tuple[LowRank, float]:
    """Return (B and A, s) with s B A = sum_i s_i B_i A_i: the stored factors, concatenated along the ranks.

    If all s_i are one positive number, that is s, and all bits stay. Otherwise s is 1, and B_i becomes float32 s_i B_i.
    """
    scales = {s for _, s in summands}
    s = scales.pop() if len(scales) == 1 and min(scales) > 0 else 1.0
    B = [t["lora_B"] if s_i == s else (s_i * t["lora_B"].double()).to(torch.float32) for t, s_i in summands]
    return LowRank(torch.cat(B, dim=1), torch.cat([tensors["lora_A"] for tensors, _ in summands])), s


def sparsified(summands: Sequence[Summand], method: str, rank: int, density: float, seed: int) -> LowRankFit:
    """Return ``ties`` or ``dare`` (`method`) of the dense s_i B_i A_i, approximated at a rank."""
    num_elements = len(summands[0][0]["lora_B"]) * summands[0][0]["lora_A"].shape[1]
    dtype = torch.float64 if num_elements <= DOUBLE_ELEMENTS else torch.float32
    factors = [low_rank(*summand).to(dtype) for summand in summands]
    return nearest_low_rank(SPARSIFIERS[method](factors, density, seed), rank, seed)


def ties(factors: Sequence[LowRank], density: float, seed: int = 0) -> Tensor:
    """Trim, elect signs and take the disjoint mean, entry by entry. Yadav et al. 2023 (arXiv 2306.01708), algorithm 1.

    Trim: keep each delta's `density` share of largest entries, and ties with the smallest of these. Elect: the sign of
    the trimmed deltas' sum. Mean: over the deltas with that sign. `seed` is unused. One delta is in memory at a time.
    """
    elected = _zeros_like(factors)
    num_others = elected.numel() - max(1, round(density * elected.numel()))
    thresholds = [one.dense().abs_().flatten().kthvalue(num_others + 1).values for one in factors]

    def trimmed() -> Iterator[Tensor]:
        for one, threshold in zip(factors, thresholds, strict=True):
            delta = one.dense()
            yield delta.mul_(delta.abs() >= threshold)

    for delta in trimmed():
        elected += delta
    elected.sign_()
    total = torch.zeros_like(elected)
    count = torch.zeros_like(elected)
    for delta in trimmed():
        agrees = (delta.sign() == elected) & (elected != 0)
        total += delta.mul_(agrees)
        count += agrees
    return total.div_(count.clamp_(min=1))


def dare(factors: Sequence[LowRank], density: float, seed: int = 0) -> Tensor:
    """Return the sum of the deltas after dropout at rate 1 - `density` (Yu et al. 2023, arXiv 2311.03099, 3.2)."""
    generator = torch.Generator().manual_seed(seed)
    total = _zeros_like(factors)
    for one in factors:
        total += one.dense() * (torch.rand(total.shape, generator=generator) < density) / density
    return total


def _zeros_like(factors: Sequence[LowRank]) -> Tensor:
    """Return zeros (out, in) in the dtype of the factors."""
    return factors[0].B.new_zeros(len(factors[0].B), factors[0].A.shape[1])


SPARSIFIERS: Final[Mapping[str, Callable[[Sequence[LowRank], float, int], Tensor]]] = {"ties": ties, "dare": dare}


def _balanced(U: Tensor, S: Tensor, Vh: Tensor, rank: int) -> LowRank:
    root = S[:rank].sqrt()
    return LowRank((U[:, :rank] * root).contiguous(), (root[:, None] * Vh[:rank]).contiguous())
