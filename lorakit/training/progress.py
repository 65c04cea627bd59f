"""The progress of a run: its counters and held-out losses, which every checkpoint stores."""

from dataclasses import dataclass


@dataclass
class Progress:
    """The counters of a run. The recipe and `step` determine everything else, such as rows and learning rate.

    evaluated_step: the last step whose held-out loss was computed. best_step: None before the first evaluation of a
    trained step.
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

    def results(self, step: int, *, started: bool) -> dict[str, float]:
        """Return the held-out losses of a step as far as they are known, and the one before the first step.

        started: True if the run began with a patch, so that the first loss is not the base's.
        """
        losses = {"eval_loss_start" if started else "eval_loss_base": self.first_eval_loss}
        if step == self.evaluated_step:
            losses["eval_loss"] = self.last_eval_loss
        elif step == self.best_step:
            losses["eval_loss"] = self.best_eval_loss
        return {name: loss for name, loss in losses.items() if loss is not None}
