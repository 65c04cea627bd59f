"""The progress of a run: its counters and held-out losses, which every checkpoint stores."""

from dataclasses import dataclass, field


@dataclass
class Progress:
    """The counters of a run. The recipe and `step` determine everything else, such as rows and learning rate.

    evaluated_step: the last step with a held-out loss. best_step: None before the first evaluation of a trained step.
    *_measures: of the answers in the evaluations of these losses; empty where none were generated. *_eval_losses: by
    source, where held-out rows have several or a named one.
    """

    step: int = 0
    tokens: int = 0
    label_tokens: int = 0
    evaluated_step: int | None = None
    first_eval_loss: float | None = None
    last_eval_loss: float | None = None
    best_eval_loss: float | None = None
    best_step: int | None = None
    evals_without_gain: int = 0
    first_eval_losses: dict[str, float] = field(default_factory=dict)
    last_eval_losses: dict[str, float] = field(default_factory=dict)
    first_measures: dict[str, float] = field(default_factory=dict)
    last_measures: dict[str, float] = field(default_factory=dict)
    best_measures: dict[str, float] = field(default_factory=dict)

    def add_evaluation(
        self,
        loss: float,
        measures: dict[str, float],
        best: str,
        losses: dict[str, float] | None = None,
        *,
        lower_is_better: bool = False,
    ) -> bool:
        """Add the evaluation of this step. True if the step is the best one so far.

        best: `loss`, or the measure that decides; an evaluation without it decides nothing. losses: by source.
        lower_is_better: of this measure; the loss always is.
        """
        self.evaluated_step = self.step
        self.last_eval_loss = loss
        self.last_measures = measures
        self.last_eval_losses = losses or {}
        if self.first_eval_loss is None:
            self.first_eval_loss = loss
            self.first_measures = measures
            self.first_eval_losses = self.last_eval_losses
        # step 0 is the base alone: it cannot be the best step, because there is no trained adapter to save
        if self.step == 0 or best not in ("loss", *measures):
            return False
        if self.best_eval_loss is None:
            improved = True
        elif best == "loss":
            improved = loss < self.best_eval_loss
        elif lower_is_better:
            improved = measures[best] < self.best_measures[best]
        else:
            improved = measures[best] > self.best_measures[best]
        if improved:
            self.best_eval_loss = loss
            self.best_step = self.step
            self.evals_without_gain = 0
            self.best_measures = measures
        else:
            self.evals_without_gain += 1
        return improved

    def results(self, step: int, *, started: bool) -> dict[str, float]:
        """Return the held-out loss and measures of a step as far as they are known, and the loss before the first step.

        started: True if the run began with a patch, so that the first loss is not the base's.
        """
        losses = {"eval_loss_start" if started else "eval_loss_base": self.first_eval_loss}
        measures: dict[str, float] = {}
        if step == self.evaluated_step:
            losses["eval_loss"] = self.last_eval_loss
            measures = self.last_measures
            losses |= {f"eval_loss/{source}": loss for source, loss in self.last_eval_losses.items()}
        elif step == self.best_step:
            losses["eval_loss"] = self.best_eval_loss
            measures = self.best_measures
        known = {name: loss for name, loss in losses.items() if loss is not None}
        return known | {f"eval_{name}": value for name, value in measures.items()}
