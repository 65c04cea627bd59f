"""KTO: each row has one answer, which is desirable or not. Ethayarajh et al. 2024 (2402.01306).

    D = log p - log p at the run's start, each the sum over an answer's label tokens
    z = max(0, mean D of mismatched rows, each one row's prompt with another row's answer), without gradient
    f = l_D sigmoid(-beta (D - z)) of a row whose answer is desirable, l_U sigmoid(beta (D - z)) of another
    loss = sum of weight x f / sum of weights, over all rows of a step

Invariant: z is the mean over all rows of a step, so no layout of a step changes it. TRL's is that of a device's batch.
A row's weight is below 0 where its answer is undesirable.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lorakit.objectives.objective import FirstPass, Objective, Scores


def build_kto(settings: Mapping[str, float]) -> Objective:
    """Return the objective, which knows z after its first pass. settings: as of `SETTINGS` in recipe/objective.py."""
    beta = settings["beta"]

    def given(gains: list[tuple[float, int]]) -> Objective:
        number = sum(rows for _, rows in gains)
        z = max(sum(gain for gain, _ in gains) / max(number, 1), 0.0)  # in this order, which keeps NaN

        def terms(scores: Scores) -> tuple[Tensor, ...]:
            weights = _weights(scores)
            shares = torch.where(weights > 0, settings["desirable_weight"], settings["undesirable_weight"])
            losses = torch.sigmoid(-beta * weights.sign() * (_gains(scores) - z))
            return ((weights.abs() * shares * losses).sum(),)

        def mean_of(values: Tensor, wanted: Tensor) -> tuple[Tensor, float]:
            return (values.detach() * wanted.to(values.device)).sum(), float(wanted.sum())

        return Objective(
            counts=lambda batch: (float(batch.row_weights.abs().sum()),),
            terms=terms,
            metrics={  # TRL's names, of scores and batch
                "rewards/chosen": lambda s, b: mean_of(beta * _gains(s), b.row_weights > 0),
                "rewards/rejected": lambda s, b: mean_of(beta * _gains(s), b.row_weights < 0),
                "rewards/accuracies": lambda s, b: mean_of((_gains(s) * _weights(s) > 0).float(), b.row_weights != 0),
                "logps/chosen": lambda s, b: mean_of(-s.losses, b.row_weights > 0),
                "logps/rejected": lambda s, b: mean_of(-s.losses, b.row_weights < 0),
                "kl": lambda s, b: mean_of(torch.full_like(s.losses, z), b.row_weights != 0),
            },
            differences={"rewards/margins": ("rewards/chosen", "rewards/rejected")},
            per="row",
            measures=("rewards/accuracies",),
            reads_references=True,
            first_pass=FirstPass(lambda s, b: (float(_gains(s).sum()), len(b.row_labels)), given, mismatched=True),
        )

    return given([])


def _weights(scores: Scores) -> Tensor:
    return torch.ones_like(scores.losses) if scores.weights is None else scores.weights


def _gains(scores: Scores) -> Tensor:
    """Return D of each row, (rows,). A rank without rows has no references either."""
    return -scores.losses if scores.references is None else -scores.losses - scores.references
