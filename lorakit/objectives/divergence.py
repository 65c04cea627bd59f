"""How far a model's probabilities are from those of a teacher, of which the largest at each label are known.

    q, p: the teacher's and the model's probabilities of K tokens, and of all others together
    M = beta q + (1 - beta) p
    divergence = beta KL(q || M) + (1 - beta) KL(p || M); of beta 0 it is KL(q || p), of beta 1 KL(p || q)

That is the generalised Jensen-Shannon divergence of Agarwal et al. 2023 (GKD, 2306.13649) in TRL's reading. To count
all other tokens as one can only lower it, and changes nothing where K is the vocabulary.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

if TYPE_CHECKING:  # that file imports this one
    from lorakit.objectives.cross_entropy import HeadVocabulary

SMALLEST: Final = 1e-30  # probability of all other tokens, at least, because its logarithm is computed
Teacher = tuple[Tensor, Tensor]
"""the K tokens of each label, (labels, K) int64, no two alike; log q of each and of all others, (labels, K + 1)"""


@dataclass(frozen=True)
class Divergence:
    """The loss of a label that has a teacher. sft_weight: of -log p of the label itself, which is added."""

    beta: float
    sft_weight: float = 0.0

    def of(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Return the divergence of each label, (labels,), of logarithms (labels, K + 1)."""
        if self.beta == 0:
            return _kl(log_q, log_p)
        if self.beta == 1:
            return _kl(log_p, log_q)
        log_m = torch.logaddexp(log_q + math.log(self.beta), log_p + math.log1p(-self.beta))
        return self.beta * _kl(log_q, log_m) + (1 - self.beta) * _kl(log_p, log_m)

    def of_logits(self, logits: Tensor, labels: Tensor, teacher: Teacher) -> Tensor:
        """Return the loss of each label, (labels,), of the logits of all tokens, (labels, vocabulary) float32."""
        tokens, log_q = teacher
        log_p = logits.log_softmax(-1)
        return self.of(with_others(log_p, tokens), log_q) - self.sft_weight * log_p.gather(1, labels[:, None])[:, 0]

    def of_chunk(
        self, z: Tensor, labels: Tensor, teacher: Teacher, vocabulary: "HeadVocabulary", has_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """Return (losses, hits), each (labels,), for logits z (labels, rows) of a head, and labels (labels, 1).

        Overwrites z, with d loss / d logits where it has a gradient: with c = d loss / d log p, and C their sum,
        c_v - p_v C of a token v of the K, and p_v (c_others / p_others - C) of another.
        """
        tokens, log_q = teacher
        rows, is_here = vocabulary.rows_of(tokens)
        label_rows, label_is_here = vocabulary.rows_of(labels)
        logits, target_logits = z.gather(1, rows) * is_here, z.gather(1, label_rows) * label_is_here
        largest, earlier = vocabulary.hits(z, labels)
        exps = z.sub_(largest).exp_().gather(1, rows) * is_here
        z.scatter_add_(1, rows, -exps)  # others alone are left, because 1 - sum of p has no digits where it is small
        parts = [z.sum(1, keepdim=True), exps, logits, target_logits, earlier]
        others, exps, logits, target_logits, earlier = vocabulary.sums(parts)
        total = others + exps.sum(1, keepdim=True)
        log_total = total.log() + largest
        p_others = (others / total).clamp(min=SMALLEST)
        log_p = torch.cat([logits - log_total, p_others.log()], 1)
        losses = self.of(log_p, log_q)
        if has_gradient:
            c = self._slope(log_p, log_q)
            shift = c.sum(1, keepdim=True) - self.sft_weight
            z.mul_((c[:, -1:] / p_others - shift) / total)
            z.scatter_add_(1, rows, (c[:, :-1] - exps / total * shift) * is_here)
            z.scatter_add_(1, label_rows, -self.sft_weight * label_is_here)
        hits = (target_logits == largest) & (earlier == 0)
        return losses + self.sft_weight * (log_total - target_logits)[:, 0], hits[:, 0]

    @torch.enable_grad()
    def _slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Return d divergence / d log p, (labels, K + 1)."""
        log_p.requires_grad_()
        return torch.autograd.grad(self.of(log_p, log_q).sum(), log_p)[0]


def with_others(log_p: Tensor, tokens: Tensor) -> Tensor:
    """Return log p of some tokens and of all others together, (labels, K + 1), given that of all (labels, vocabulary).

    tokens: (labels, K).
    """
    # no -inf, because where K is the vocabulary the sum of nothing but those has no gradient
    others = log_p.scatter(1, tokens, -1e4).logsumexp(1, keepdim=True).clamp(min=math.log(SMALLEST))
    return torch.cat([log_p.gather(1, tokens), others], 1)


def _kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """KL(q || p) of each label, (labels,), of logarithms (labels, K + 1)."""
    return (log_q.exp() * (log_q - log_p)).sum(1)
