"""A stage of a pipeline: some of a model's layers, the messages to its neighbours, and the order of a step.

Hidden states go to the next stage, their gradients to the one before. Every stage makes the same micro-batches, so each
knows the shape of what it receives and no shape is sent.

Received hidden states enter where the layer before this stage's first one would be called, and not as `inputs_embeds`,
because some models change the embedding's output (Granite multiplies it, GPT-2 adds positions).

The order is one forward, one backward (1F1B: PipeDream, Harlap et al. 2018, arXiv 1806.03377; with one update per step
as in Megatron-LM, Narayanan et al. 2021, arXiv 2104.04473): at most `num_stages - stage` micro-batches wait for their
backward. Schedules that fill the remaining time with weight gradients (zero bubble) have nothing to fill it with here,
because the base is frozen.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lorakit.base.layers import layer_lists
from lorakit.data.batch import Batch
from lorakit.errors import RunError
from lorakit.objectives.cross_entropy import LossModel, loss_inputs, token_scores
from lorakit.objectives.divergence import Teacher
from lorakit.objectives.objective import Scores
from lorakit.ops.packed_attention import RowLengths
from lorakit.parallel.group import Mesh


@final
class RemoteLayer(nn.Module):
    """A layer of another stage. It returns the hidden states of its call, or those that were received.

    Models choose a layer's mask by its index and its plain attributes, so the list of layers has its length, and
    attributes such as `attention_type` are those of the layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if not name.startswith("_") and isinstance(value, str | int | float | bool) and name != "training":
                setattr(self, name, value)
        self.stage: Stage | None = None

    def forward(self, hidden_states: Tensor, *inputs: Any, **settings: Any) -> Tensor:
        return hidden_states if self.stage is None else self.stage.forward_hidden(hidden_states)


@final
class Stage:
    """The layers of a model that are here, and the messages to the stages before and after.

    There are two groups of the same ranks, one for the messages of each direction, because on GPUs the messages of a
    group wait for each other: a stage that sends a hidden state may have to receive a gradient first.
    """

    def __init__(self, model: nn.Module, layers: range, first_trained: int, mesh: Mesh, device: torch.device) -> None:
        """Replace the other layers. first_trained: the first stage that trains, to which gradients go back."""
        self.layers = layers
        self.ranks = mesh.pipeline
        self.device = device
        self.is_first = self.ranks.rank == 0
        self.is_last = self.ranks.rank == self.ranks.size - 1
        self.sends_gradient = self.ranks.rank > first_trained
        self.receives_gradient = self.ranks.rank >= first_trained and not self.is_last
        self._hidden_group = mesh.pipeline.device_group
        self._gradient_group = mesh.pipeline_backward.device_group
        self._width = model.config.get_text_config().hidden_size  # type: ignore[union-attr, operator]
        self._dtype = next(p.dtype for p in model.parameters() if p.is_floating_point() and not p.requires_grad)
        self._received: Tensor | None = None
        self._output: Tensor | None = None
        (decoder,) = layer_lists(model)
        for index, layer in enumerate(list(decoder)):
            if index not in layers:
                decoder[index] = other = RemoteLayer(layer)
                if index in (layers.start - 1, layers.stop):  # the neighbours of this stage's layers
                    other.stage = self

    def inputs(self, inputs: dict[str, Any], hidden: Tensor | None) -> dict[str, Any]:
        """Return the model's inputs at this stage. hidden: received from the stage before; None at the first."""
        self._received = hidden
        if hidden is None:
            return inputs
        # zeros that take no memory, because `forward_hidden` replaces the embedding's output
        nothing = hidden.new_zeros(1).expand(hidden.shape)
        return {**{key: value for key, value in inputs.items() if key != "input_ids"}, "inputs_embeds": nothing}

    def forward_hidden(self, hidden: Tensor) -> Tensor:
        """Return the received hidden states before this stage's layers, and note those behind them."""
        if self._received is not None:
            received = self._received
            self._received = None
            return received
        self._output = hidden
        return hidden

    def output(self) -> Tensor:
        """Return the hidden states behind this stage's layers, once."""
        output = self._output
        self._output = None
        assert output is not None
        return output

    def receive_hidden(self, shape: Sequence[int]) -> Tensor:
        """Receive the hidden states of tokens of this shape from the stage before, (lines, tokens, width)."""
        hidden = torch.empty(*shape, self._width, dtype=self._dtype, device=self.device)
        dist.recv(hidden, group=self._hidden_group, group_src=self.ranks.rank - 1)
        return hidden

    def send_hidden(self, hidden: Tensor) -> dist.Work | None:
        """Begin to send (lines, tokens, width) to the next stage. Raises RunError unless it expects size and dtype."""
        if hidden.shape[-1] != self._width or hidden.dtype != self._dtype:
            given = f"{tuple(hidden.shape)} in {hidden.dtype}, and its config says {self._width} in {self._dtype}"
            raise RunError(f"parallel.pipeline: between this base's layers go tensors of {given}; leave it out")
        return dist.isend(hidden.detach().contiguous(), group=self._hidden_group, group_dst=self.ranks.rank + 1)

    def receive_gradient(self, hidden: Tensor) -> Tensor:
        """Return the gradient of the hidden states that were sent to the next stage."""
        gradient = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        dist.recv(gradient, group=self._gradient_group, group_src=self.ranks.rank + 1)
        return gradient

    def send_gradient(self, gradient: Tensor) -> dist.Work | None:
        """Begin to send a gradient to the stage before."""
        return dist.isend(gradient.contiguous(), group=self._gradient_group, group_dst=self.ranks.rank - 1)


@final
class StageLossModel(LossModel):
    """A `LossModel` of which this process has one stage."""

    stage: Stage

    @staticmethod
    def of(loss_model: LossModel, stage: Stage) -> "StageLossModel":
        """Make a loss model that of a stage, in place, because others hold the same object."""
        loss_model.__class__ = StageLossModel
        assert isinstance(loss_model, StageLossModel)
        loss_model.stage = stage
        if not stage.is_last:
            loss_model.head = None
        return loss_model

    def forward(  # type: ignore[override] # with two arguments more
        self,
        labels: Tensor | None = None,
        row_lengths: RowLengths | None = None,
        label_positions: Tensor | None = None,
        teacher: Teacher | None = None,
        own_stage: bool = False,
        hidden: Tensor | None = None,
        **inputs: Tensor,
    ) -> Any:
        """Return the result of the full `LossModel`, all stages in turn, without gradient.

        own_stage: compute this stage alone, for hidden (lines, tokens, width); all but the last return hidden states.
        """
        stage = self.stage

        def compute(hidden: Tensor | None) -> Any:
            own = stage.inputs(inputs, hidden)
            if stage.is_last:
                return LossModel.forward(self, labels, row_lengths, label_positions, teacher, **own)
            self.model.base_model(**self.model_inputs(own, row_lengths))  # type: ignore[operator]
            return stage.output()

        if own_stage:
            return compute(hidden)
        with torch.no_grad():
            if not stage.is_first:
                hidden = stage.receive_hidden(inputs["input_ids"].shape)
            result = compute(hidden)
            if not stage.is_last:
                sending = stage.send_hidden(result)
                assert sending is not None  # torch returns None to ranks outside of the group
                sending.wait()
                result = ()
            own = [result] if isinstance(result, Tensor) else result
            shared = stage.ranks.all_gather_tensors({str(index): each.cpu() for index, each in enumerate(own)})
            tensors = tuple(each.to(stage.device) for each in shared.values())
            return tensors[0] if labels is None else tensors


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
