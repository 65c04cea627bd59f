"""A stage of a pipeline: some of a model's layers, and the messages to the stages before and after.

Hidden states go to the next stage, their gradients to the one before. Every stage makes the same micro-batches, so each
knows the shape of what it receives and no shape is sent.

Received hidden states enter where the layer before this stage's first one would be called, and not as `inputs_embeds`,
because some models change the embedding's output (Granite multiplies it, GPT-2 adds positions).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lorakit.errors import RunError
from lorakit.objectives.cross_entropy import LossModel
from lorakit.ops.packed_attention import RowLengths
from lorakit.parallel.group import Group


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
    """The layers of a decoder that are here. first_trained: the first stage that trains, to which gradients go back."""

    def __init__(self, decoder: nn.ModuleList, layers: range, link: "StageLink", first_trained: int) -> None:
        self.layers = layers
        self.link = link
        self.sends_gradient = link.rank > first_trained
        self.receives_gradient = link.rank >= first_trained and not link.is_last
        self._received: Tensor | None = None
        self._output: Tensor | None = None
        for index, layer in enumerate(list(decoder)):
            if index not in layers:
                decoder[index] = other = RemoteLayer(layer)
                if index in (layers.start - 1, layers.stop):  # the neighbours of this stage's layers
                    other.stage = self

    def facts(self) -> dict[str, Any]:
        """Return the layers of this stage, and what it sends and receives for each micro-batch."""
        return {
            "number": self.link.rank,
            "layers": [self.layers.start, self.layers.stop],
            "is_first": self.link.is_first,
            "is_last": self.link.is_last,
            "sends_gradient": self.sends_gradient,
            "receives_gradient": self.receives_gradient,
        }

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


@final
@dataclass(frozen=True, eq=False)
class StageLink:
    """A process's neighbours in its pipeline. width: values of a token's hidden state.

    forward, backward: the pipeline's ranks, for messages in each direction. There are two groups of them, because on
    GPUs the messages of a group wait for each other: a stage that sends a hidden state may have to receive a gradient
    first.
    """

    forward: Group
    backward: Group
    width: int
    dtype: torch.dtype
    device: torch.device

    @property
    def rank(self) -> int:
        return self.forward.rank

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.forward.size - 1

    def receive_hidden(self, shape: Sequence[int]) -> Tensor:
        """Receive the hidden states of tokens of this shape from the stage before, (lines, tokens, width)."""
        hidden = torch.empty(*shape, self.width, dtype=self.dtype, device=self.device)
        dist.recv(hidden, group=self.forward.device_group, group_src=self.rank - 1)
        return hidden

    def send_hidden(self, hidden: Tensor) -> dist.Work:
        """Begin to send (lines, tokens, width) to the next stage. Raises RunError unless it expects size and dtype."""
        if hidden.shape[-1] != self.width or hidden.dtype != self.dtype:
            raise RunError(
                f"parallel.pipeline: between this base's layers go tensors of {tuple(hidden.shape)} in {hidden.dtype},"
                f" and its config says {self.width} values in {self.dtype} for a token; leave it out"
            )
        return _work(dist.isend(hidden.detach().contiguous(), group=self.forward.device_group, group_dst=self.rank + 1))

    def receive_gradient(self, hidden: Tensor) -> Tensor:
        """Return the gradient of the hidden states that were sent to the next stage."""
        gradient = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        dist.recv(gradient, group=self.backward.device_group, group_src=self.rank + 1)
        return gradient

    def send_gradient(self, gradient: Tensor) -> dist.Work:
        """Begin to send a gradient to the stage before."""
        return _work(dist.isend(gradient.contiguous(), group=self.backward.device_group, group_dst=self.rank - 1))


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
        if not stage.link.is_last:
            loss_model.head = None
        return loss_model

    def forward(  # type: ignore[override] # with two arguments more
        self,
        labels: Tensor | None = None,
        row_lengths: RowLengths | None = None,
        label_positions: Tensor | None = None,
        own_stage: bool = False,
        hidden: Tensor | None = None,
        **inputs: Tensor,
    ) -> Any:
        """Return the result of the full `LossModel`, all stages in turn, without gradient.

        own_stage: compute this stage alone, for hidden (lines, tokens, width); all but the last return hidden states.
        """
        link = self.stage.link

        def compute(hidden: Tensor | None) -> Any:
            own = self.stage.inputs(inputs, hidden)
            if link.is_last:
                return LossModel.forward(self, labels, row_lengths, label_positions, **own)
            self.model.base_model(**self.model_inputs(own, row_lengths))  # type: ignore[operator]
            return self.stage.output()

        if own_stage:
            return compute(hidden)
        with torch.no_grad():
            if not link.is_first:
                hidden = link.receive_hidden(inputs["input_ids"].shape)
            result = compute(hidden)
            if not link.is_last:
                link.send_hidden(result).wait()
                result = ()
            own = [result] if isinstance(result, Tensor) else result
            shared = link.forward.all_gather_tensors({str(index): each.cpu() for index, each in enumerate(own)})
            tensors = tuple(each.to(link.device) for each in shared.values())
            return tensors[0] if labels is None else tensors


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None  # torch returns None to ranks outside of the group
    return work
