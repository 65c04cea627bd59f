"""The numbers that an engine reports of a step or of held-out rows, over all ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class GradientReport:
    """The numbers of a step's forward and backward passes, over all ranks."""

    loss: float
    num_tokens: int
    num_label_tokens: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class StepReport(GradientReport):
    """The numbers of an optimizer step, over all ranks. grad_norm: 2-norm of the gradient before clipping."""

    grad_norm: float
    learning_rate: float


@dataclass(frozen=True)
class LossReport:
    """The objective's loss and metrics of some micro-batches, over all ranks."""

    loss: float
    metrics: Mapping[str, float]
    by_source: Mapping[str, "LossReport"] = field(default_factory=dict)
    """name of a source of held-out rows -> loss and metrics of its rows"""


class NonFiniteStep(Exception):
    """The loss or the gradient of a step is not finite, and nothing was updated. `rows`: the rows to suspect."""

    def __init__(self, loss: float, grad_norm: float, rows: tuple[int, ...]) -> None:
        super().__init__(f"loss {loss}, gradient norm {grad_norm}")
        self.rows = rows
