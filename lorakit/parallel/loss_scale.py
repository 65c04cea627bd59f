"""Dynamic loss scaling for float16: multiply the loss by S, so that small gradients do not underflow.

After an overflow the same step runs once more with half the scale. Other trainers skip the step's rows instead.
"""

from typing import Final, final

import torch
from torch import Tensor

# the words are those of torch.amp.GradScaler
INITIAL_SCALE: Final = 2.0**16
MIN_SCALE: Final = 2.0**-14
MAX_SCALE: Final = 2.0**24
GROWTH_INTERVAL: Final = 1000  # steps without an overflow before the scale is doubled
LOSS_SCALE_KEY: Final = "loss_scale"  # in a checkpoint's optimizer state


@final
class LossScale:
    """The scale S, and the number of steps since it last changed. If not `dynamic`, S is always 1."""

    def __init__(self, dynamic: bool) -> None:
        self.dynamic, self.value, self._good_steps = dynamic, INITIAL_SCALE if dynamic else 1.0, 0

    def back_off(self) -> bool:
        """Halve the scale after an overflow. False if the scale is fixed or already the smallest."""
        if not self.dynamic or self.value <= MIN_SCALE:
            return False
        self.value, self._good_steps = self.value / 2, 0
        return True

    def record_good_step(self) -> None:
        """Count a step without overflow, and double the scale after GROWTH_INTERVAL of them."""
        self._good_steps += 1
        if self.dynamic and self._good_steps >= GROWTH_INTERVAL and self.value < MAX_SCALE:
            self.value, self._good_steps = self.value * 2, 0

    def state(self) -> dict[str, Tensor]:
        """Return the tensors to save in a checkpoint. Empty if the scale is fixed."""
        return (
            {LOSS_SCALE_KEY: torch.tensor([self.value, self._good_steps], dtype=torch.float32)} if self.dynamic else {}
        )

    def restore(self, state: Tensor | None) -> None:
        """Load [scale, steps since it changed] from a checkpoint. None, of a run without scaling, changes nothing."""
        if self.dynamic and state is not None:
            self.value, self._good_steps = float(state[0]), int(state[1])
