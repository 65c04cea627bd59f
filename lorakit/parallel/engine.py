"""The interface between the training loop and the place where training runs.

The loop uses these names and no others, so it never contains a backend's name. `step` is one verb because DeepSpeed
fuses backward, clipping and update.
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
    """The numbers of one optimizer step, over all ranks.

    loss: mean per label token. grad_norm: 2-norm of the adapter's gradient before clipping.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    num_label_tokens: int


@dataclass(frozen=True)
class StepSettings:
    """The settings of an optimizer step, the same for the whole run.

    max_grad_norm: None means no clipping. learning_rate: maps a step, counted from 0, to its rate. scales_loss: True
    for float16, whose small gradients would underflow unless the loss is scaled.
    """

    seed: int
    max_grad_norm: float | None
    learning_rate: Callable[[int], float]
    scales_loss: bool = False


FillParameter = Callable[[str, int, Tensor], None]
"""(name, start, out): fills `out` from the base's files with a flattened parameter's elements from `start` on."""
BuildOptimizer = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]


class NonFiniteStep(Exception):
    """The loss or the gradient of a step is not finite, and nothing was updated. `rows`: the rows to suspect."""

    def __init__(self, loss: float, grad_norm: float, rows: tuple[int, ...]) -> None:
        super().__init__(f"loss {loss}, gradient norm {grad_norm}")
        self.loss, self.grad_norm, self.rows = loss, grad_norm, rows


class Engine(Protocol):
    """One process's part of a run: model, optimizer and the messages between ranks.

    set_phase: called with the current activity, which the watchdog puts into error messages. shards_base: True if the
    base must be built on meta, because `prepare` reads only this rank's part of each tensor. loss_model: the model and
    its loss, there after `prepare`.
    """

    rank: int
    world_size: int
    device: torch.device
    group: Group
    set_phase: Callable[[str], None]
    shards_base: bool
    loss_model: LossModel

    def prepare(
        self, model: nn.Module, optimizer: BuildOptimizer, settings: StepSettings, fill: FillParameter | None = None
    ) -> None:
        """Shard the model, fill its parameters that are on meta, and build the optimizer. Call once. Collective."""

    def step(self, index: int, micro_batches: Sequence[Batch]) -> StepReport:
        """Run optimizer step `index`, counted from 0, on this rank's micro-batches. Collective.

        Law: the update equals that of one process given the micro-batches of every rank, with loss = sum of token
        losses / number of label tokens, both over all ranks and micro-batches.

        Raises:
            NonFiniteStep: on every rank. Nothing was updated.
        """

    def evaluate(self, micro_batches: Iterable[Batch], stop: Callable[[], bool]) -> float | None:
        """Return the mean loss per label token over all ranks, or None once `stop` is True on any rank. Collective."""

    def tensors_without_gradient(self) -> list[str]:
        """Return the names of the adapter tensors that have had no gradient in any step. Collective."""

    def gather(self) -> dict[str, Tensor]:
        """Return the full adapter tensors, by name, in float32 on the CPU. Never includes the base. Collective."""

    def gather_optimizer(self) -> dict[str, Tensor]:
        """Return the full optimizer state on the CPU, as `<tensor name>.<part>`. Collective."""

    def restore(self, adapter: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """Load the results of `gather` and `gather_optimizer`, of any backend and number of processes."""

    def layout(self) -> dict[str, Any]:
        """Return the facts of this rank as they were measured: engine, device, and resident bytes by category."""
