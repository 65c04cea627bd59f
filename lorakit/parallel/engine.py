"""The interface between the training loop and the place where training runs.

The loop uses these names and no others, so it never contains a backend's name. There are no smaller verbs than
`accumulate` and `update`, because DeepSpeed fuses unscaling, clipping and update.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lorakit.base.lazy import LazyBase
from lorakit.data.batch import Batch
from lorakit.objectives.cross_entropy import LossModel
from lorakit.parallel.group import Group
from lorakit.parallel.mesh import Mesh


@dataclass(frozen=True)
class StepReport:
    """The numbers of one optimizer step, over all ranks.

    loss: of the objective; for `sft` the mean per label token. grad_norm: 2-norm of the adapter's gradient before
    clipping. metrics: the objective's own, by name.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    num_label_tokens: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class LossReport:
    """The objective's loss and metrics of some micro-batches, over all ranks."""

    loss: float
    metrics: Mapping[str, float]
    by_source: Mapping[str, "LossReport"] = field(default_factory=dict)
    """name of a source of held-out rows -> loss and metrics of its rows"""


@dataclass(frozen=True)
class StepSettings:
    """The settings of an optimizer step, the same for the whole run.

    max_grad_norm: None means no clipping. learning_rate: maps a step, counted from 0, to its rate. scales_loss: True
    for float16, whose small gradients would underflow unless the loss is scaled. label_share: share of the rows' tokens
    that have a label, by which a pipeline's stages are cut.
    """

    seed: int
    max_grad_norm: float | None
    learning_rate: Callable[[int], float]
    scales_loss: bool = False
    label_share: float = 1.0


BuildOptimizer = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class EngineState:
    """Full tensors on the CPU, so independent of backend and number of processes. The frozen base is never among them.

    adapter: by tensor name, float32. optimizer: as `<tensor name>.<part>`.
    """

    adapter: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]


class NonFiniteStep(Exception):
    """The loss or the gradient of a step is not finite, and nothing was updated. `rows`: the rows to suspect."""

    def __init__(self, loss: float, grad_norm: float, rows: tuple[int, ...]) -> None:
        super().__init__(f"loss {loss}, gradient norm {grad_norm}")
        self.loss, self.grad_norm, self.rows = loss, grad_norm, rows


class Engine(Protocol):
    """One process's part of a run: model, optimizer and the messages between ranks.

    group: all ranks. mesh: the same ranks by axes; what scales with rows asks `mesh.data`,
    and with tokens `mesh.tokens`.
    set_phase: called with the current activity, which the watchdog puts into error messages. shards_base: True if the
    base must be built on meta, because `prepare` reads only this rank's part of each tensor.
    """

    rank: int
    device: torch.device
    group: Group
    mesh: Mesh
    set_phase: Callable[[str], None]
    shards_base: bool

    def prepare(
        self,
        loss_model: LossModel,
        optimizer: BuildOptimizer,
        settings: StepSettings,
        weights: LazyBase | None = None,
    ) -> None:
        """Shard the model, fill its parameters that are on meta, and build the optimizer. Call once. Collective.

        loss_model: the adapted model and the objective to minimise. weights: of a base on meta.
        """

    def step(self, index: int, micro_batches: Sequence[Batch]) -> StepReport:
        """Run optimizer step `index`, counted from 0, on this rank's micro-batches: `accumulate`, then `update`.

        Collective. Law: the update equals that of one process given the micro-batches of every rank, with the loss of
        `objectives.objective`: sums over all ranks and micro-batches, divided by counts over the same.

        Raises:
            NonFiniteStep: on every rank. Nothing was updated.
        """

    def accumulate(self, index: int, micro_batches: Sequence[Batch]) -> LossReport:
        """Compute the gradient of step `index`. Call it once before each `update`. Collective.

        Raises:
            NonFiniteStep: on every rank.
        """

    def update(self, rate: float) -> float:
        """Clip the gradient, update the adapter at this learning rate, and free the gradient. Collective.

        Returns the gradient's norm before clipping. A norm that is not finite means: nothing was updated.
        """

    def evaluate(self, micro_batches: Iterable[Batch], stop: Callable[[], bool]) -> LossReport | None:
        """Return loss and metrics over all ranks, or None once `stop` is True on any rank. Collective."""

    def decoding(self) -> AbstractContextManager[None]:
        """Return a context in which the model's own forward computes every token that it is called with.

        Ranks that share its weights call it alike, and get the same logits.
        """

    def tensors_without_gradient(self) -> list[str]:
        """Return the names of the adapter tensors that have had no gradient in any step. Collective."""

    def adapter_state_dict(self) -> dict[str, Tensor]:
        """Return the full adapter tensors, by name, in float32 on the CPU. Never includes the base. Collective."""

    def state_dict(self) -> EngineState:
        """Return everything that a checkpoint holds of this engine. Collective."""

    def load_state_dict(self, state: EngineState) -> None:
        """Load the result of `state_dict`, of any backend and number of processes."""

    def layout(self) -> dict[str, Any]:
        """Return the facts of this rank as they were measured: engine, device, and resident bytes by category."""
