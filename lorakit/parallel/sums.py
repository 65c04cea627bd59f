"""The sums of a step: what an objective's terms and metrics add up to over micro-batches and ranks."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from lorakit.data.batch import Batch
from lorakit.errors import RunError
from lorakit.objectives.objective import Objective, Scores
from lorakit.parallel.group import Group, Mesh


def step_counts(objective: Objective, micro_batches: Sequence[Batch], group: Group) -> list[float]:
    """Return tokens, label tokens and normalisers of a step over all ranks, given this rank's part. Collective."""
    counts = [objective.counts(batch) for batch in micro_batches]
    return group.all_reduce_sum(
        sum(batch.num_tokens for batch in micro_batches),
        sum(batch.num_label_tokens for batch in micro_batches),
        *(sum(values) for values in zip(*counts, strict=True)),
    )


def loss_terms(objective: Objective, scores: Scores, batch: Batch) -> Sequence[Tensor]:
    """Return the objective's terms. Raises RunError unless each count has a scalar one, and one has a gradient."""
    terms = objective.terms(scores)
    num_counts = len(objective.counts(batch))
    if not isinstance(terms, Sequence) or len(terms) != num_counts:
        number = len(terms) if isinstance(terms, Sequence) else f"a {type(terms).__name__}"
        raise RunError(f"objective: `terms` gives {number}, and `counts` {num_counts}; one term for each count")
    if wrong := [term for term in terms if not isinstance(term, Tensor) or term.dim()]:
        shown = f"shape {tuple(wrong[0].shape)}" if isinstance(wrong[0], Tensor) else repr(wrong[0])[:40]
        raise RunError(f"objective: a term is a scalar tensor, such as scores.losses.sum(), got {shown}")
    if scores.losses.requires_grad and not any(term.requires_grad for term in terms):
        raise RunError("objective: no term has a gradient; compute them from scores.losses, without detach or item")
    return terms


@final
@dataclass
class LossAccumulator:
    """Terms, metrics and counts of the micro-batches of this rank. They stay on the device until `reduce`."""

    objective: Objective
    terms: list[tuple[Tensor, ...]] = field(default_factory=list)  # of each micro-batch, without gradient
    _metrics: list[list[Tensor]] = field(default_factory=list)
    _counts: list[list[float]] = field(default_factory=list)

    def add(self, scores: Scores, batch: Batch) -> Sequence[Tensor]:
        """Add a micro-batch, whose scores may be those of some of its tokens; return its terms."""
        terms = loss_terms(self.objective, scores, batch)
        metrics = [metric(scores, batch) for metric in self.objective.metrics.values()]
        self.terms.append(tuple(term.detach() for term in terms))
        self._metrics.append([total for total, _ in metrics])
        self._counts.append([*self.objective.counts(batch), *(count for _, count in metrics)])
        return terms

    def nonfinite(self, micro_batches: Sequence[Batch]) -> list[Batch]:
        """Return the micro-batches with a term that is not finite. Only the last stage of a pipeline has terms."""
        pairs = zip(micro_batches, self.terms, strict=False)
        return [batch for batch, terms in pairs if not all(map(torch.isfinite, terms))]

    def reduce(self, mesh: Mesh) -> tuple[float, dict[str, float]]:
        """Return loss and metrics over all ranks, each with equally many micro-batches, or none. Collective."""
        if not self.terms:  # only the last stage of a pipeline has terms
            return mesh.pipeline.all_gather((math.nan, dict[str, float]()))[-1]
        columns = [*zip(*self.terms, strict=True), *zip(*self._metrics, strict=True)]
        # all in one tensor, because each transfer from a GPU waits for it
        totals = torch.stack([torch.stack(column).sum() for column in columns]).tolist()
        counts = [sum(column) for column in zip(*self._counts, strict=True)]
        summed = mesh.replicas.all_reduce_sum(*totals, *counts)
        # ranks that share the tokens of a micro-batch count all of it, and all have the scores of full rows
        copies = 1 if self.objective.per == "row" else mesh.sequence.size
        means = [
            total / (count / copies) if count else math.nan
            for total, count in zip(summed[: len(totals)], summed[len(totals) :], strict=True)
        ]
        num_terms = len(self.terms[0])
        own = zip(self.objective.metrics, means[num_terms:], summed[len(totals) + num_terms :], strict=True)
        metrics = {name: mean for name, mean, count in own if count}  # without those of no row
        pairs = self.objective.differences.items()
        metrics |= {name: metrics[a] - metrics[b] for name, (a, b) in pairs if metrics.keys() >= {a, b}}
        return mesh.pipeline.all_gather((sum(means[:num_terms]), metrics))[-1]


@dataclass(frozen=True)
class LossReport:
    """The objective's loss and metrics of some micro-batches, over all ranks."""

    loss: float
    metrics: Mapping[str, float]
    by_source: Mapping[str, "LossReport"] = field(default_factory=dict)
    """name of a source of held-out rows -> loss and metrics of its rows"""


@final
class EvaluationSums:
    """The sums of held-out rows on this rank: over all of them, and over those of each source."""

    def __init__(self, objective: Objective) -> None:
        self._all = LossAccumulator(objective)
        self._by_source: defaultdict[str, LossAccumulator] = defaultdict(lambda: LossAccumulator(objective))

    def add(self, batch: Batch, scores: Scores | None) -> None:
        """Add a micro-batch. scores: None on a stage of a pipeline that is not the last."""
        # on every stage, because reducing is collective
        for sums in [self._all] if batch.source is None else [self._all, self._by_source[batch.source]]:
            if scores is not None:
                sums.add(scores, batch)

    def report(self, mesh: Mesh) -> LossReport:
        """Return loss and metrics over all ranks. Collective."""
        reports = {source: LossReport(*each.reduce(mesh)) for source, each in self._by_source.items()}
        return LossReport(*self._all.reduce(mesh), reports)
