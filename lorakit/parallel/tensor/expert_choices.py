"""Compare which experts the ranks chose for the tokens that all of them have, without a message of its own.

Ranks that share each expert compute the same router on the same bits, so they choose alike. Were one to differ, its
part would be added to parts of other experts, and nothing else would show it.
"""

from typing import Any, Final, final

import torch
from torch import Tensor, nn

MODULUS: Final = 65_521
"""a prime below 2^16: sums over 256 ranks are exact in float32"""


@final
class ExpertChoices:
    """A checksum of all choices since it was last taken. The hook works on any module of experts of transformers."""

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def before_experts(self, experts: nn.Module, args: tuple[Any, ...]) -> None:
        """Add the choice, as a forward pre-hook of experts: called with hidden states, indices (tokens, k), weights."""
        if len(args) < 2 or not isinstance(args[1], Tensor) or args[1].is_floating_point():
            raise RuntimeError("experts are called without the indices of those that were chosen")
        chosen = args[1].detach().flatten().long() + 1
        factors = torch.arange(1, len(chosen) + 1, device=chosen.device) % MODULUS
        total = 0 if self._total is None else 31 * self._total
        self._total = (total + (chosen * factors).sum()) % MODULUS

    def take(self) -> Tensor | None:
        """Return the checksum, and begin anew; None if no expert was called."""
        total = self._total
        self._total = None
        return total
