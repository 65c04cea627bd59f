"""Objectives of preferences: of single rows (KTO), or of pairs, rows 2 i and 2 i + 1: a chosen and a rejected answer.

    D = log p - log p at the run's start, each the sum over an answer's label tokens; n: their number
    m = log p / n
    loss of a pair = f(chosen, rejected); loss = sum of weight x f / sum of weights, over all pairs of a step

Invariant: a loss reads the sums of full rows, so no layout of a step changes it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from lorakit.data.batch import Batch
from lorakit.objectives.embed import build_embed
from lorakit.objectives.objective import OF_LABELS, FirstPass, Objective, Scores, Settings

PAIR_MEASURES: Final = ("rewards/accuracies", "rewards/margins")  # metrics that are shown beside a held-out loss


@dataclass(frozen=True)
class AnswerScores:
    """One answer of each pair of a micro-batch; every tensor is (pairs,) float32."""

    log_probs: Tensor  # sum over the label tokens
    lengths: Tensor  # label tokens
    references: Tensor | None  # log_probs at the run's start; None where the objective does not read them

    @property
    def gains(self) -> Tensor:
        """D, the change of log p since the run's start; log p without one."""
        return self.log_probs if self.references is None else self.log_probs - self.references

    @property
    def mean_gains(self) -> Tensor:
        """D / n, or m without a reference."""
        return self.gains / self.lengths


ReadPairs = Callable[[AnswerScores, AnswerScores], Tensor]  # (chosen, rejected) -> a value of each pair, (pairs,)


def _dpo(chosen: AnswerScores, rejected: AnswerScores, settings: Settings) -> Tensor:
    """(-(1-e) log sigmoid(d) + e log sigmoid(-d)) / (1 - 2 e), d = beta (D_c - D_r). 2403.00409, equation 8.

    Where e, the share of flipped pairs, is 0: -log sigmoid(d), Rafailov et al. 2023 (2305.18290). Without references
    CPO's, 2401.08417.
    """
    flipped = settings.get("label_smoothing", 0.0)
    difference = settings["beta"] * (chosen.gains - rejected.gains)
    return (flipped * logsigmoid(-difference) - (1 - flipped) * logsigmoid(difference)) / (1 - 2 * flipped)


def _ipo(chosen: AnswerScores, rejected: AnswerScores, settings: Settings) -> Tensor:
    """(D_c / n_c - D_r / n_r - 1 / (2 beta))^2. Azar et al. 2023 (2310.12036), with means as its authors confirmed."""
    return (chosen.mean_gains - rejected.mean_gains - 1 / (2 * settings["beta"])) ** 2


def _hinge(chosen: AnswerScores, rejected: AnswerScores, settings: Settings) -> Tensor:
    """max(0, 1 - beta (D_c - D_r)). Zhao et al. 2023 (SLiC, 2305.10425)."""
    return relu(1 - settings["beta"] * (chosen.gains - rejected.gains))


def _dpo_of_means(chosen: AnswerScores, rejected: AnswerScores, settings: Settings) -> Tensor:
    """-log sigmoid(beta (D_c / n_c - D_r / n_r)), Lambert et al. 2024 (Tulu 3, 2411.15124); SimPO without references
    and with a margin: -log sigmoid(beta (m_c - m_r) - gamma), Meng et al. 2024 (2405.14734)."""
    return -logsigmoid(settings["beta"] * (chosen.mean_gains - rejected.mean_gains) - settings.get("gamma", 0.0))


def _reward(chosen: AnswerScores, rejected: AnswerScores, settings: Settings) -> Tensor:
    """-log sigmoid(r_c - r_r) + c (r_c + r_r)^2, with a reward as the sum. Ouyang et al. 2022; 2312.09244 for c."""
    both = chosen.log_probs + rejected.log_probs
    return settings["center_rewards_coefficient"] * both**2 - logsigmoid(chosen.log_probs - rejected.log_probs)


def _orpo(chosen: AnswerScores, rejected: AnswerScores, settings: Settings) -> Tensor:
    """-beta log sigmoid(log odds_c - log odds_r), odds of exp(m). Hong et al. 2024 (2403.07691)."""
    # below 0, because the odds of a certain answer are infinite; expm1, because 1 - exp(m) has no digits near there
    means = [answers.mean_gains.clamp(max=-1e-8) for answers in (chosen, rejected)]
    odds = [mean - torch.log(-torch.expm1(mean)) for mean in means]
    return -settings["beta"] * logsigmoid(odds[0] - odds[1])


def reward_loss(values: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """-r of a reward r: a row's score is its reward then, as log p is that of an answer."""
    return -values[:, 0], torch.zeros_like(values[:, 0])


@dataclass(frozen=True)
class PairLoss:
    """The loss of a pair. compute: (chosen, rejected, settings) -> loss of each pair, (pairs,)."""

    compute: Callable[[AnswerScores, AnswerScores, Settings], Tensor]
    reads_references: bool = True  # compares with the model at the run's start
    of_head: bool = False  # sums are rewards, and no log-probabilities
    averages: bool = False  # an answer's reward is of means and not of sums, as in TRL


def build_kto(settings: Settings) -> Objective:
    """Return KTO's objective, which knows z after its first pass. Ethayarajh et al. 2024 (2402.01306).

    Each row has one answer, which is desirable, or where its weight is below 0 undesirable.

    z = max(0, mean D of mismatched rows, each one row's prompt with another row's answer), without gradient
    f = l_D sigmoid(-beta (D - z)) of a row whose answer is desirable, l_U sigmoid(beta (D - z)) of another
    loss = sum of weight x f / sum of weights, over all rows of a step

    z is the mean over all rows of a step, so no layout of a step changes it. TRL's is that of a device's batch.
    """
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


LOSSES: Final[Mapping[str, PairLoss]] = {
    "dpo": PairLoss(_dpo),
    "ipo": PairLoss(_ipo),
    "robust_dpo": PairLoss(_dpo),
    "hinge": PairLoss(_hinge),
    "sigmoid_norm": PairLoss(_dpo_of_means),
    "cpo": PairLoss(_dpo, reads_references=False),
    "simpo": PairLoss(_dpo_of_means, reads_references=False, averages=True),
    "orpo": PairLoss(_orpo, reads_references=False, averages=True),
    "reward": PairLoss(_reward, reads_references=False, of_head=True),
}
"""name in the recipe's `objective` section -> its loss"""
OF_SINGLE_ROWS: Final = {**OF_LABELS, "kto": build_kto, "embed": build_embed}
"""name in the recipe's `objective` section -> the objective, for its keys with their values"""


def build_objective(name: str, settings: Settings) -> Objective:
    """Return the objective of a recipe's `objective` section. settings: its keys with their values."""
    if name in OF_SINGLE_ROWS:
        return OF_SINGLE_ROWS[name](settings)
    loss = LOSSES[name]
    sft_weight = settings.get("sft_weight", 0.0)
    beta = settings.get("beta", 1.0)

    def terms(scores: Scores) -> tuple[Tensor, ...]:
        chosen, rejected = _answers(scores)
        weights = 1.0 if scores.weights is None else scores.weights[::2]
        of_pairs = (loss.compute(chosen, rejected, settings) * weights).sum()
        return (of_pairs, -sft_weight * (chosen.log_probs * weights).sum()) if sft_weight else (of_pairs,)

    def counts(batch: Batch) -> tuple[float, ...]:
        weights = batch.row_weights.tolist()
        pairs = sum(weights[::2])
        chosen_tokens = sum(weight * labels for weight, labels in zip(weights[::2], batch.row_labels[::2], strict=True))
        return (pairs, chosen_tokens) if sft_weight else (pairs,)

    def reward(answers: AnswerScores) -> Tensor:
        return beta * (answers.mean_gains if loss.averages else answers.gains)

    def log_prob(answers: AnswerScores) -> Tensor:
        return answers.mean_gains if loss.averages else answers.log_probs

    def metric(read: ReadPairs, scores: Scores, batch: Batch) -> tuple[Tensor, float]:
        values = read(*_answers(scores)).detach()
        return values.sum(), float(len(values))

    metrics: dict[str, ReadPairs] = {  # TRL's names
        "rewards/chosen": lambda chosen, rejected: reward(chosen),
        "rewards/rejected": lambda chosen, rejected: reward(rejected),
        "rewards/margins": lambda chosen, rejected: reward(chosen) - reward(rejected),
        "rewards/accuracies": lambda chosen, rejected: (reward(chosen) > reward(rejected)).float(),
    }
    if not loss.of_head:
        metrics |= {
            "logps/chosen": lambda chosen, rejected: log_prob(chosen),
            "logps/rejected": lambda chosen, rejected: log_prob(rejected),
        }
    return Objective(
        counts=counts,
        terms=terms,
        metrics={key: partial(metric, read) for key, read in metrics.items()},
        per="row",
        group_size=2,
        measures=PAIR_MEASURES,
        reads_references=loss.reads_references,
        head_loss=reward_loss if loss.of_head else None,
    )


def _answers(scores: Scores) -> tuple[AnswerScores, AnswerScores]:
    """Return the chosen and the rejected answers of a micro-batch."""
    assert scores.lengths is not None
    references = (None, None) if scores.references is None else (scores.references[::2], scores.references[1::2])
    return (
        AnswerScores(-scores.losses[::2], scores.lengths[::2], references[0]),
        AnswerScores(-scores.losses[1::2], scores.lengths[1::2], references[1]),
    )
