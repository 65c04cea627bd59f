"""The state that training updates: one adapter's tensors with the optimizer built for them, loss scale and step.

An engine reads the tensors from here and never searches the model for them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, final

import torch
from torch import Tensor, nn

from lorakit.errors import RunError
from lorakit.quant.bnb import OPTIMIZERS as BNB_OPTIMIZERS
from lorakit.quant.bnb import bnb_optimizer

if TYPE_CHECKING:
    from lorakit.recipe import TrainSection

BuildOptimizer = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]
Wrapped = tuple[nn.Module, torch.optim.Optimizer]  # an engine's module to call for a forward pass, and its optimizer

# the words are those of torch.amp.GradScaler
INITIAL_SCALE: Final = 2.0**16
MIN_SCALE: Final = 2.0**-14
MAX_SCALE: Final = 2.0**24
GROWTH_INTERVAL: Final = 1000  # steps without an overflow before the scale is doubled

RATE_RATIO: Final = "rate_ratio"  # key of a parameter group: its learning rate over the run's


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


def build_optimizer(train: "TrainSection", tensors: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of a recipe's `train` section, of torch or bitsandbytes, over named float32 tensors.

    The learning rate is 0 until `set_rate`. With `loraplus_lr_ratio` that of B is this multiple of A's (LoRA+, Hayou et
    al. 2024, arXiv 2402.12354). Raises RunError: as `check_tensors`, or bitsandbytes is not installed.
    """
    name = train.optimizer
    betas = train.beta1, train.beta2
    check_tensors(name, tensors)
    groups = [{"params": list(tensors.values()), RATE_RATIO: 1.0}]
    if train.loraplus_lr_ratio is not None:
        B = {name for name in tensors if name.endswith("lora_B")}
        groups = [
            {"params": [tensor for name, tensor in tensors.items() if (name in B) == is_B], RATE_RATIO: rate_ratio}
            for is_B, rate_ratio in ((False, 1.0), (True, train.loraplus_lr_ratio))
        ]
        # torch wants a group, and a pipeline's stage may have nothing to train
        groups = [group for group in groups if group["params"]] or groups[:1]
    settings: dict[str, Any] = {"lr": 0.0, "weight_decay": train.weight_decay}
    if name == "sgd":
        return torch.optim.SGD(groups, **settings, momentum=betas[0])
    if name == "muon":  # updates of the size of AdamW's, so that learning rates are those of AdamW
        return torch.optim.Muon(groups, **settings, momentum=betas[0], adjust_lr_fn="match_rms_adamw")
    if name == "adafactor":
        # torch multiplies the rate by max(eps, root mean square of the tensor): with its own 1e-3, B, which starts at
        # zero, would hardly move
        return torch.optim.Adafactor(groups, **settings, eps=(None, 1.0))
    settings |= {"betas": betas} | ({} if name == "lion" else {"eps": train.epsilon})
    if name in BNB_OPTIMIZERS:
        return bnb_optimizer(name, groups, **settings)
    return torch.optim.AdamW(groups, **settings, fused=True)


def check_tensors(name: str, tensors: Mapping[str, nn.Parameter]) -> None:
    """Raise RunError unless an optimizer can update these tensors: muon updates the matrices A and B alone."""
    others = [key for key, tensor in tensors.items() if tensor.dim() != 2 or not key.endswith(("lora_A", "lora_B"))]
    if name == "muon" and others:
        what = f"{len(others)} other tensors learn here, {others[0]} {tuple(tensors[others[0]].shape)} first"
        raise RunError(f"train.optimizer: muon updates the matrices A and B alone; {what}. Use adamw")


def set_rate(groups: Iterable[dict[str, Any]], rate: float) -> None:
    """Set the learning rate of every group of an optimizer."""
    for group in groups:
        group["lr"] = rate * group.get(RATE_RATIO, 1.0)
