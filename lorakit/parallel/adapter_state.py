"""The state that training updates: one adapter's tensors with their optimizer, loss scale and step.

An engine reads the tensors from here and never searches the model for them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, final

import torch
from torch import Tensor, nn

BuildOptimizer = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]
Wrapped = tuple[nn.Module, torch.optim.Optimizer]  # an engine's module to call for a forward pass, and its optimizer

# the words are those of torch.amp.GradScaler
INITIAL_SCALE: Final = 2.0**16
MIN_SCALE: Final = 2.0**-14
MAX_SCALE: Final = 2.0**24
GROWTH_INTERVAL: Final = 1000  # steps without an overflow before the scale is doubled


@dataclass(frozen=True)
class StepSettings:
    """The settings of an optimizer step, the same for the full run."""

    seed: int
    max_grad_norm: float | None  # None means no clipping
    learning_rate: Callable[[int], float]  # maps a step, counted from 0, to its rate
    scales_loss: bool = False  # True for float16, whose small gradients would underflow unless the loss is scaled
    label_share: float = 1.0  # of the rows' tokens, by which a pipeline's stages are cut


@dataclass(frozen=True)
class EngineState:
    """Full tensors on the CPU. adapter: by tensor name, float32. optimizer: as `<tensor name>.<part>`."""

    adapter: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]


@final
class LossScale:
    """The factor of a float16 run's loss, so that small gradients do not underflow; always 1 if not `dynamic`."""

    KEY: ClassVar = "loss_scale"  # in a checkpoint's optimizer state

    def __init__(self, dynamic: bool) -> None:
        self.dynamic = dynamic
        self.value = INITIAL_SCALE if dynamic else 1.0
        self._good_steps = 0

    def back_off(self) -> bool:
        """Halve the scale after an overflow. False if the scale is fixed or already the smallest."""
        if not self.dynamic or self.value <= MIN_SCALE:
            return False
        self.value /= 2
        self._good_steps = 0
        return True

    def record_good_step(self) -> None:
        """Count a step without overflow, and double the scale after GROWTH_INTERVAL of them."""
        self._good_steps += 1
        if self.dynamic and self._good_steps >= GROWTH_INTERVAL and self.value < MAX_SCALE:
            self.value *= 2
            self._good_steps = 0

    def state(self) -> dict[str, Tensor]:
        """Return the tensors to save in a checkpoint. Empty if the scale is fixed."""
        if not self.dynamic:
            return {}
        return {self.KEY: torch.tensor([self.value, self._good_steps], dtype=torch.float32)}

    def restore(self, state: Tensor) -> None:
        """Load [scale, steps since its last change] from a checkpoint, unless the scale is fixed."""
        if self.dynamic:
            self.value = float(state[0])
            self._good_steps = int(state[1])


@final
@dataclass
class AdapterState:
    """One adapter on an engine."""

    tensors: Mapping[str, nn.Parameter]  # that learn, of this rank's layers; shards where the engine shards
    saved: Mapping[str, nn.Parameter]  # those, and tensors that do not learn (LoRA-FA's A), as patches hold them
    optimizer: torch.optim.Optimizer
    scale: LossScale
    without_gradient: set[str]  # names of the tensors that have had no gradient in any step
    step: int = 0  # updates so far, which is the index of the step under way

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the tensors that have one."""
        return [tensor.grad for tensor in self.tensors.values() if tensor.grad is not None]


def to_cpu(tensor: Tensor) -> Tensor:
    """Return a float32 copy in host memory."""
    return tensor.detach().to("cpu", torch.float32, copy=True)
