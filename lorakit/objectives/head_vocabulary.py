"""The tokens whose rows an output head has here: all of them, or in a subclass those of one rank."""

from collections.abc import Sequence

import torch
from torch import Tensor


class HeadVocabulary:
    """The tokens whose logits a head computes: all ``size`` of them.

    A head with the rows of some tokens alone has a subclass, whose methods combine its logits with those of the others.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def enter(self, hidden: Tensor) -> Tensor:
        """Return the hidden states (labels, width); their gradient is the sum of those by all rows of the head."""
        return hidden

    def max_rows(self) -> int:
        """Return the number of logits of a label by which chunks are sized."""
        return self.size

    def rows_of(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the head's row of each of these tokens (labels, any), and 1.0 where the head has it, else 0.0."""
        return labels, torch.ones_like(labels, dtype=torch.float32)

    def come_before(self, rows: Tensor, labels: Tensor) -> Tensor:
        """True where a row of the head is of an earlier token than the label, each (labels, 1)."""
        return rows < labels

    def maximum(self, largest: Tensor) -> Tensor:
        """Return the largest logit of each label, given that of the head's rows; may overwrite it."""
        return largest

    def sums(self, partial: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the sums over all tokens, given those over the head's rows, each (labels, any)."""
        return partial

    def hits(self, z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest logit of each label, and 1.0 where an earlier token than the label has it here.

        Logits z (labels, rows), labels (labels, 1); both results (labels, 1). A hit is the argmax, which of equal
        logits is the first: with ties counted, a model whose logits are all equal would have an accuracy of 1.
        """
        own, first = z.max(1, keepdim=True)
        largest = self.maximum(own.clone())
        return largest, ((own == largest) & self.come_before(first, labels)).float()
