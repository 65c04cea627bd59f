"""What the training loop knows of where training runs: one narrow interface.

``step`` is one verb because some engines fuse backward, clipping and update; with smaller verbs their names would
leak into the loop.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lorakit.data.batch import Batch
from lorakit.objectives.cross_entropy import LossModel
from lorakit.parallel.group import Group


@dataclass(frozen=True)
class StepReport:
    """One optimizer step: mean loss per label token, gradient norm before clipping, learning rate, token counts."""

    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    num_label_tokens: int


@dataclass(frozen=True)
class StepSettings:
    """What one optimizer step needs to know, besides the rows."""

    seed: int
    max_grad_norm: float | None
    learning_rate: Callable[[int], float]
    """step, counted from 0 -> learning rate"""
    scales_loss: bool = False
    """float16: gradients are computed larger than they are, so that small ones are not lost"""


FillParameter = Callable[[str, int, Tensor], None]
"""(parameter name, start, tensor): fills the tensor with the frozen parameter's elements from start on, from files."""
BuildOptimizer = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]


class NonFiniteStep(Exception):
    """Loss or gradient is not finite; nothing was updated. ``rows`` are the rows that were in the step."""

    def __init__(self, loss: float, grad_norm: float, rows: tuple[int, ...]) -> None:
        super().__init__(f"loss {loss}, gradient norm {grad_norm}")
        self.loss, self.grad_norm, self.rows = loss, grad_norm, rows


class Engine(Protocol):
    """Where the arithmetic happens. The loop uses these names and no others."""

    rank: int
    world_size: int
    device: torch.device
    group: Group
    phase: Callable[[str], None]
    """Told where the run is, for the words of an error."""
    shards_base: bool
    """The base is built without weights, and ``prepare`` reads this rank's part of each."""

    loss_model: LossModel
    """The model as it is called, once ``prepare`` has taken it."""

    def prepare(
        self, model: nn.Module, optimizer: BuildOptimizer, settings: StepSettings, read: FillParameter | None = None
    ) -> None:
        """Take ownership, once, after the adapter is attached. ``read`` fills parameters that are still on meta."""

    def step(self, index: int, micro_batches: Sequence[Batch]) -> StepReport:
        """Optimizer step ``index`` (counted from 0).

        Law: the update equals that of one process given the micro-batches of every rank, with loss = sum of token
        losses / number of label tokens, both over all ranks and micro-batches.

        Raises:
            NonFiniteStep: on every rank; nothing was updated.
        """

    def evaluate(self, micro_batches: Iterable[Batch], stop: Callable[[], bool]) -> float | None:
        """Mean loss per label token over all ranks' micro-batches, or None when asked to stop."""

    def tensors_without_gradient(self) -> list[str]:
        """Adapter tensors that no step so far has given a gradient."""

    def gather(self) -> dict[str, Tensor]:
        """Whole adapter tensors in float32 on the CPU. Collective; never the base."""

    def gather_optimizer(self) -> dict[str, Tensor]:
        """Optimizer state by tensor name, whole, on the CPU. Collective."""

    def restore(self, adapter: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """Put back what ``gather`` and ``gather_optimizer`` gave, on any layout."""

    def observed(self) -> dict[str, Any]:
        """What is really there: engine, device, and the bytes this rank holds by category."""
