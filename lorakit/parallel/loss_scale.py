"""Dynamic loss scaling for float16: gradients are computed S times as large, so that small ones are not lost.

When a gradient overflows, the same step is taken again with half the scale: no row is skipped.
"""

from typing import Final, final

import torch
from torch import Tensor

INITIAL_SCALE: Final = 2.0**16
MIN_SCALE: Final = 2.0**-14
MAX_SCALE: Final = 2.0**24
GROWTH_INTERVAL: Final = 1000  # steps without an overflow before the scale is doubled
KEY: Final = "loss_scale"


@final
class LossScale:
    """The scale S and how many steps it has held. Without ``dynamic`` it is 1 and stays 1."""

    def __init__(self, dynamic: bool) -> None:
        self.dynamic, self.value, self._good_steps = dynamic, INITIAL_SCALE if dynamic else 1.0, 0

    def back_off(self) -> bool:
        """Halve the scale after an overflow; False when that cannot help."""
        if not self.dynamic or self.value <= MIN_SCALE:
            return False
        self.value, self._good_steps = self.value / 2, 0
        return True

    def record_good_step(self) -> None:
        """Note a step without overflow."""
        self._good_steps += 1
        if self.dynamic and self._good_steps >= GROWTH_INTERVAL and self.value < MAX_SCALE:
            self.value, self._good_steps = self.value * 2, 0

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        return {KEY: torch.tensor([self.value, self._good_steps], dtype=torch.float32)} if self.dynamic else {}

    def restore(self, state: Tensor | None) -> None:
        """Take back what ``state`` gave."""
        if self.dynamic and state is not None:
            self.value, self._good_steps = float(state[0]), int(state[1])
