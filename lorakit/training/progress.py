"""The progress of a run: its counters and evaluations, which every checkpoint stores."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EvaluationResult:
    """The evaluation of a step. losses: by source, where held-out rows have several or a named one.

    measures: of the answers, and ``measure/source`` of a source's own; empty where none were generated.
    """

    step: int
    loss: float
    losses: dict[str, float]
    measures: dict[str, float]


@dataclass
class Progress:
    """The counters of a run. The recipe and `step` determine everything else, such as rows and learning rate.

    best: None before the first evaluation of a trained step.
    """

    step: int = 0
    tokens: int = 0
    label_tokens: int = 0
    first: EvaluationResult | None = None
    last: EvaluationResult | None = None
    best: EvaluationResult | None = None
    evals_without_gain: int = 0

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> "Progress":
        """Return the progress whose fields a checkpoint holds."""
        evaluations = {name: EvaluationResult(**values[name]) for name in ("first", "last", "best") if values[name]}
        return cls(**{**values, **evaluations})

    @property
    def best_step(self) -> int | None:
        return None if self.best is None else self.best.step

    def add_evaluation(
        self, loss: float, losses: dict[str, float], measures: dict[str, float], best: str, *, lower_is_better: bool
    ) -> bool:
        """Add the evaluation of this step. True if the step is the best one so far.

        best: `loss`, or the measure that decides; an evaluation without it decides nothing. lower_is_better: of this
        measure; the loss always is. losses, measures: see `EvaluationResult`.
        """
        now = EvaluationResult(self.step, loss, losses, measures)
        self.first = self.first or now
        self.last = now
        # step 0 is the base alone: it cannot be the best step, because there is no trained adapter to save
        if self.step == 0 or best not in ("loss", *measures):
            return False
        improved = self.best is None
        if self.best is not None:
            value, before = (one.loss if best == "loss" else one.measures[best] for one in (now, self.best))
            improved = value < before if best == "loss" or lower_is_better else value > before
        self.best = now if improved else self.best
        self.evals_without_gain = 0 if improved else self.evals_without_gain + 1
        return improved

    def results(self, step: int, *, started: bool) -> dict[str, float]:
        """Return the held-out loss and measures of a step as far as they are known, and the loss before the first step.

        started: True if the run began with a patch, so that the first loss is not the base's.
        """
        results = dict[str, float]()
        if self.first is not None:
            results["eval_loss_start" if started else "eval_loss_base"] = self.first.loss
        for one in (self.best, self.last):
            if one is not None and one.step == step:
                results["eval_loss"] = one.loss
                results |= {f"eval_loss/{source}": loss for source, loss in one.losses.items()}
                results |= {f"eval_{name}": value for name, value in one.measures.items()}
        return results
