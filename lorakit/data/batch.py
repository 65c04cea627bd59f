"""One micro-batch: what data makes and an engine computes with."""

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

IGNORE_INDEX: Final = -100
"""The label of a position that is not learnt."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch. ``labels`` are shifted already: position t holds the token to predict after token t.

    Packed: one line holding every row end to end, ``position_ids`` restart at each row, no attention mask; each row
    has ``row_lengths`` tokens.
    Padded: one line per row, padded on the right and masked.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    rows: tuple[int, ...]
    num_tokens: int
    num_label_tokens: int
    row_lengths: tuple[int, ...] = ()
    label_positions: Tensor | None = None
    """Where there is a label, all lines end to end; made by ``to`` on the host, so that no device is waited for."""

    def to(self, device: torch.device) -> "Batch":
        """The same micro-batch on a device."""
        positions = torch.nonzero(self.labels.flatten() != IGNORE_INDEX)[:, 0]
        tensors = {
            name: None if value is None else value.to(device, non_blocking=True)
            for name, value in (
                ("input_ids", self.input_ids), ("labels", self.labels),
                ("position_ids", self.position_ids), ("attention_mask", self.attention_mask),
                ("label_positions", positions),
            )
        }  # fmt: skip
        return replace(self, **tensors)  # type: ignore[arg-type]
