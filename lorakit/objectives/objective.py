"""What a run minimises: rows of pure functions over the losses of label tokens.

    loss = sum over k of  (sum of term_k over ranks and micro-batches) / (sum of count_k over ranks and micro-batches)

So a step's update does not depend on how its rows are cut into micro-batches or spread over ranks. A mean of the
micro-batches' means would: rows have different numbers of label tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from lorakit.data.batch import Batch


@dataclass(frozen=True)
class Scores:
    """What the model says of the label tokens of one micro-batch."""

    losses: Tensor
    """(labels,) float32: -log p of each label token, with gradient"""
    hits: Tensor
    """(labels,) float32: 1 where the label has the largest logit, else 0; without gradient"""
    weights: Tensor | None = None
    """(labels,) float32: weight of each label's row; None: all are 1"""

    def weighted_sum(self, values: Tensor) -> Tensor:
        """Return the sum of values (labels,), each times the weight of its label's row."""
        return values.sum() if self.weights is None else (values * self.weights).sum()


@dataclass(frozen=True)
class Objective:
    """One objective. A new one is one row in OBJECTIVES; the law of the step holds for every row."""

    counts: Callable[[Batch], tuple[float, ...]]
    """micro-batch -> what it adds to each normaliser; read on the host, before forward"""
    terms: Callable[[Scores], tuple[Tensor, ...]]
    """scores -> one numerator for each normaliser, scalars with gradient"""
    metrics: Mapping[str, Callable[[Scores, Batch], tuple[Tensor, float]]]
    """name -> (scores, micro-batch) -> (sum, count); reported is the sum of sums / the sum of counts"""


SFT: Final = Objective(
    counts=lambda batch: (batch.sum_of_weights(),),
    terms=lambda scores: (scores.weighted_sum(scores.losses),),
    metrics={"accuracy": lambda scores, batch: (scores.weighted_sum(scores.hits), batch.sum_of_weights())},
)
"""The mean cross-entropy of the label tokens, each counted as often as its row's weight says."""

OBJECTIVES: Final[Mapping[str, Objective]] = {"sft": SFT}
"""name in the recipe's `objective` section -> objective"""
