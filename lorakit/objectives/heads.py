"""The losses of the values that a head of the adapter's own computes for rows, and the objective of classifiers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from lorakit.objectives.objective import SFT, HeadLoss, Objective


def reward_loss(values: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """-r of a reward r: a row's score is its reward then, as log p is that of an answer."""
    return -values[:, 0], torch.zeros_like(values[:, 0])


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


def build_classify(settings: Mapping[str, Any]) -> Objective:
    """Return the objective of the labels of rows. Its terms are a function of its own: its mean is no perplexity."""
    loss = HEAD_LOSSES[settings["problem_type"]]
    named = {} if loss is _number else SFT.metrics
    return replace(SFT, terms=lambda scores: SFT.terms(scores), head_loss=loss, metrics=named, measures=tuple(named))
