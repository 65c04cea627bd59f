"""A step through the stages of a pipeline: which micro-batch a stage computes when, and what it has under way.

The order is one forward, one backward (1F1B: PipeDream, Harlap et al. 2018, arXiv 1806.03377; with one update per step
as in Megatron-LM, Narayanan et al. 2021, arXiv 2104.04473): at most `num_stages - stage` micro-batches wait for their
backward. Schedules that fill the remaining time with weight gradients (zero bubble) have nothing to fill it with here,
because the base is frozen.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lorakit.data.batch import Batch
from lorakit.objectives.cross_entropy import LossModel, loss_inputs, token_scores
from lorakit.objectives.objective import Scores
from lorakit.parallel.pipeline.stage import StageLossModel

FORWARD: Final = "forward"
BACKWARD: Final = "backward"


def one_forward_one_backward(stage: int, num_stages: int, num_micro_batches: int) -> Iterator[tuple[str, int]]:
    """Yield (FORWARD or BACKWARD, number of the micro-batch) in the order in which a stage computes them."""
    num_ahead = min(num_stages - 1 - stage, num_micro_batches)
    for number in range(num_micro_batches + num_ahead):
        if number < num_micro_batches:
            yield FORWARD, number
        if number >= num_ahead:
            yield BACKWARD, number - num_ahead


@dataclass(frozen=True)
class StageForward:
    """A micro-batch whose forward is done at this stage. scores: at the last stage, else None."""

    scores: Scores | None
    received: Tensor | None = None
    output: Tensor | None = None
    sending: dist.Work | None = None

    def wait(self) -> None:
        """Wait until the next stage has the output."""
        if self.sending is not None:
            self.sending.wait()


@final
class StageSteps:
    """Forward and backward of micro-batches through a stage, or through a full model."""

    def __init__(self, model: nn.Module, loss_model: LossModel) -> None:
        """model: the engine's wrapper of the loss model."""
        self._model = model
        self._stage = loss_model.stage if isinstance(loss_model, StageLossModel) else None
        self._sending: dist.Work | None = None

    def forward(self, batch: Batch) -> StageForward:
        """Compute this stage for a micro-batch, with the hidden states of the stage before, if there is one."""
        if self._stage is None:
            return StageForward(token_scores(self._model, batch))
        received = None
        if not self._stage.is_first:
            received = self._stage.receive_hidden(batch.input_ids.shape)
            received.requires_grad_(self._stage.sends_gradient and torch.is_grad_enabled())
        output = self._model(**loss_inputs(batch), own_stage=True, hidden=received)
        if self._stage.is_last:
            return StageForward(Scores(output[0], output[1], batch.label_weights), received)
        return StageForward(None, received, output, self._stage.send_hidden(output))

    def backward(self, forward: StageForward, loss: Tensor | None, run: Callable[[Tensor], None]) -> None:
        """Compute a micro-batch's gradients. loss: at the last stage. run: the engine's backward of a loss."""
        forward.wait()  # also where no gradient comes back: torch drops a message whose `Work` is freed
        if loss is not None:
            run(loss)
        elif self._stage is not None and self._stage.receives_gradient:
            assert forward.output is not None
            torch.autograd.backward(forward.output, self._stage.receive_gradient(forward.output))
        if self._stage is not None and self._stage.sends_gradient:
            assert forward.received is not None
            assert forward.received.grad is not None
            self.wait()  # so that at most one gradient is in memory for sending
            self._sending = self._stage.send_gradient(forward.received.grad)

    def wait(self) -> None:
        """Wait until the stage before has the last gradient."""
        if self._sending is not None:
            self._sending.wait()
            self._sending = None
