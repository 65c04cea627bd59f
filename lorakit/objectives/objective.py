"""What a run minimises: rows of pure functions over the losses of label tokens.

    loss = sum over k of  (sum of term_k over ranks and micro-batches) / (sum of count_k over ranks and micro-batches)

So a step's update does not depend on how its rows are cut into micro-batches or spread over ranks. A mean of the
micro-batches' means would: rows have different numbers of label tokens.

Ranks that share a line have some label tokens of each row. There, sums over label tokens add up, and no other function
does: an objective whose terms are others reads the scores of full rows instead (`per="row"`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lorakit.data.batch import Batch
from lorakit.errors import RunError
from lorakit.objectives.divergence import Divergence

Settings = Mapping[str, Any]  # as of `SETTINGS` in recipe/objective.py


@dataclass(frozen=True)
class Scores:
    """Losses and hits of the label tokens of one micro-batch, or the sums of each of its rows."""

    losses: Tensor  # (labels,) float32: -log p of each label token, with gradient; or (rows,)
    hits: Tensor  # (labels,) float32: 1 where the label has the largest logit, else 0; without gradient; or (rows,)
    weights: Tensor | None = None
    """(labels,) float32: weight of each label, its own times its row's; None: all are 1; or (rows,)"""
    lengths: Tensor | None = None
    """(rows,) float32: label tokens of each row; None where scores are of label tokens"""
    references: Tensor | None = None
    """(rows,) float32: log p of each row's labels at the run's start; None unless the objective reads them"""
    states: Tensor | None = None
    """(labels, width) float32: the last hidden state before each label, with gradient; or (rows, width), their mean;
    None unless the objective reads them, whose losses and hits are 0 then"""
    row_indices: tuple[int, ...] = ()  # of the rows, in their data set

    def weighted_sum(self, values: Tensor) -> Tensor:
        """Return the sum of values (labels,), each times the weight of its label; or (rows,)."""
        return values.sum() if self.weights is None else (values * self.weights).sum()


def sums_of_rows(values: Tensor, batch: Batch) -> Tensor:
    """Return the sum of each row's values, (rows, ...), of values of a micro-batch's label tokens, (labels, ...).

    A row's labels are neighbours. The sums are the same in every run, where adding at indices on a GPU is in any order.
    """
    parts = values.split(batch.row_labels)
    return torch.stack([part.sum(0) for part in parts]) if parts else values  # a rank without rows has no labels


def scores_of_rows(scores: Scores, batch: Batch, add_up: Callable[[Tensor], Tensor]) -> Scores:
    """Return the scores of full rows, given those of the label tokens here.

    add_up: adds up the sums of ranks that have other tokens of the rows; the gradient of each is the sum's.
    Raises RunError: label tokens have weights of their own, of which a function of a row's sum knows nothing.
    """
    if batch.token_weights is not None:
        raise RunError(
            'objective: per="row" reads the sums of rows, and some rows bring `weights` of their tokens; leave these'
            ' out (data.ignore_keys: [weights]), or give an objective with per="token"'
        )
    values = scores.losses, scores.hits, torch.ones_like(scores.hits)
    losses, hits, lengths = add_up(torch.stack([sums_of_rows(each, batch) for each in values]))
    rows = {"weights": batch.row_weights, "lengths": lengths.detach(), "references": batch.row_references}
    if scores.states is not None:
        rows["states"] = add_up(sums_of_rows(scores.states, batch)) / lengths.detach()[:, None]
    return replace(scores, losses=losses, hits=hits.detach(), row_indices=batch.row_indices, **rows)


@dataclass(frozen=True)
class FirstPass:
    """What couples the rows of a step: something small of all of them, computed first and without gradient."""

    collect: Callable[[Scores, Batch], object]  # of a micro-batch
    given: Callable[[list[Any]], "Objective"]  # what was collected of all micro-batches -> the objective of the step
    mismatched: bool = False  # the first pass is over rows' prompts with other rows' answers, instead of the rows


HeadLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(values (labels, any) float32 with gradient, numbers of the labels (labels,)) -> losses and hits, as of `Scores`"""


@dataclass(frozen=True)
class Objective:
    """One objective. The law of the step holds for every one. Raises RunError: no such `per` or `group_size`."""

    counts: Callable[[Batch], tuple[float, ...]]
    """micro-batch -> what it adds to each normaliser; read on the host, before forward"""
    terms: Callable[[Scores], tuple[Tensor, ...]]
    """scores -> one numerator for each normaliser, scalars with gradient"""
    metrics: Mapping[str, Callable[[Scores, Batch], tuple[Tensor, float]]]
    """name -> (scores, micro-batch) -> (sum, count); reported is the sum of sums / the sum of counts"""
    per: Literal["token", "row"] | None = None
    """the scores that terms and metrics read. token: of label tokens, and each of them is a sum over label tokens. row:
    of rows, and they are any functions. None: of label tokens, and processes cannot share lines"""
    group_size: int = 1
    """neighbouring rows of a file that stay together in a micro-batch, such as 2 for pairs"""
    measures: tuple[str, ...] = ()
    """names of metrics that are shown beside the held-out loss at the end of a run"""
    divergence: Divergence | None = None
    """the loss of a label whose teacher is known; None: it is -log p of the label"""
    reads_references: bool = False
    """scores have the log p of each row at the run's start"""
    reads_states: bool = False
    """scores have the hidden states of rows, and no losses"""
    head_loss: HeadLoss | None = None
    """of the values of a head of the adapter's own; None: their cross-entropy, as of the logits of tokens"""
    first_pass: FirstPass | None = None
    """before a step or an evaluation; None: no row's loss depends on another row"""
    differences: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """name -> two metrics; reported is the difference of both, where both are"""

    @property
    def has_perplexity(self) -> bool:
        """True if the loss is the mean cross-entropy of label tokens."""
        return self.terms is SFT.terms

    def __post_init__(self) -> None:
        if self.per not in ("token", "row", None):
            raise RunError(f'objective: per is "token" or "row", got {self.per!r}')
        if not isinstance(self.group_size, int) or self.group_size < 1:
            raise RunError(f"objective: group_size is a number of rows, got {self.group_size!r}")


SFT: Final = Objective(
    counts=lambda batch: (batch.sum_of_weights(),),
    terms=lambda scores: (scores.weighted_sum(scores.losses),),
    metrics={"accuracy": lambda scores, batch: (scores.weighted_sum(scores.hits), batch.sum_of_weights())},
    per="token",
)
"""The mean cross-entropy of the label tokens, each counted as often as the weights of its row and its own say."""


def _dft(losses: Tensor, settings: Settings) -> Tensor:
    """p L, where p has no gradient: tokens that the model finds unlikely count less. Wu et al. 2025 (2508.05629)."""
    return losses.detach().neg().exp() * losses


def _focal(losses: Tensor, settings: Settings) -> Tensor:
    """(1 - p)^gamma L: tokens that the model knows count less. Lin et al. 2017 (1708.02002)."""
    wrong = torch.expm1(-losses).neg().clamp(min=1e-12)  # at 0, a gamma below 1 has an infinite slope
    return wrong ** settings["gamma"] * losses


def _token_objective(loss: Callable[[Tensor, Settings], Tensor], settings: Settings) -> Objective:
    """Return an objective whose loss of each label token is a function of L; its metrics have L too."""
    return replace(
        SFT,
        terms=lambda scores: (scores.weighted_sum(loss(scores.losses, settings)),),
        metrics={
            **SFT.metrics,
            "cross_entropy": lambda scores, batch: (scores.weighted_sum(scores.losses), batch.sum_of_weights()),
        },
        measures=("cross_entropy",),
    )


def _several(values: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over all labels of the binary cross-entropy; a hit has exactly the row's labels, by p > 1/2."""
    wanted = numbers[:, None] >> torch.arange(values.shape[1], device=values.device) & 1
    losses = F.binary_cross_entropy_with_logits(values, wanted.float(), reduction="none").mean(1)
    return losses, ((values > 0) == (wanted > 0)).all(1).float()


def _number(values: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """(v - y)^2, for the label y whose bits are the number."""
    labels = numbers.to(torch.int32).view(torch.float32)
    return (values[:, 0] - labels) ** 2, torch.zeros_like(labels)


HEAD_LOSSES: Final[Mapping[str, HeadLoss | None]] = {
    "single_label_classification": None,
    "multi_label_classification": _several,
    "regression": _number,
}


def _classify(settings: Settings) -> Objective:
    """Return the objective of the labels of rows. Its terms are a function of its own: its mean is no perplexity."""
    loss = HEAD_LOSSES[settings["problem_type"]]
    named = {} if loss is _number else SFT.metrics
    return replace(SFT, terms=lambda scores: SFT.terms(scores), head_loss=loss, metrics=named, measures=tuple(named))


OF_LABELS: Final[Mapping[str, Callable[[Settings], Objective]]] = {
    "sft": lambda settings: SFT,
    "dft": partial(_token_objective, _dft),
    "focal": partial(_token_objective, _focal),
    "classify": _classify,
    "distill": lambda settings: replace(
        SFT, terms=lambda scores: SFT.terms(scores), divergence=Divergence(settings["beta"], settings["sft_weight"])
    ),
}
"""name in the recipe's `objective` section -> the objective, a sum over labels, for its keys with their values"""
