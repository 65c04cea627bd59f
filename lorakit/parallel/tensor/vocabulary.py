"""An embedding and an output head of which each rank has the rows of some tokens, and the loss over such a head.

Each rank computes the logits of its own tokens. The maximum and the sum of exponentials of a label's logits, its own
logit and their mean are exchanged, never the logits (Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053, section 3).
"""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from lorakit.objectives.head_vocabulary import HeadVocabulary
from lorakit.parallel.axis import exchange
from lorakit.parallel.group import Group, even_counts
from lorakit.parallel.tensor.partial_sums import copy_in, sum_out


@final
class VocabularyShard(HeadVocabulary):
    """The tokens whose rows of an embedding or output head this rank has. size: tokens of the full vocabulary."""

    def __init__(self, group: Group, size: int) -> None:
        super().__init__(size)
        self.group = group
        self._tokens = group.part(size)
        self._is_here: Tensor  # for each token of an embedding's call: 1.0 if its row is here, else 0.0

    def enter(self, hidden: Tensor) -> Tensor:
        return copy_in(hidden, self.group)

    def max_rows(self) -> int:
        return max(even_counts(self.size, self.group.size))  # of any rank, so that all ranks choose the same chunks

    def rows_of(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        rows = labels - self._tokens.start
        is_here = (rows >= 0) & (rows < len(self._tokens))
        return rows.masked_fill(~is_here, 0), is_here.float()

    def come_before(self, rows: Tensor, labels: Tensor) -> Tensor:
        return rows + self._tokens.start < labels

    def maximum(self, largest: Tensor) -> Tensor:
        return self.group.maximum(largest)

    def sums(self, partial: Sequence[Tensor]) -> Sequence[Tensor]:
        total: Tensor = self.group.sum(torch.cat(tuple(partial), 1))
        return total.split([part.shape[1] for part in partial], 1)

    def before_embedding(self, embedding: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Give an embedding the indices of its own rows, as a forward pre-hook; 0 for a token of another rank."""
        rows, self._is_here = self.rows_of(args[0])
        return (rows, *args[1:])

    def after_embedding(self, embedding: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Return each token's row, from the rank that has it, as a forward hook of an embedding."""
        return sum_out(output.masked_fill(self._is_here[..., None] == 0, 0), self.group)

    def before_head(self, head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Copy the hidden states in, as a forward pre-hook of the output head."""
        return (copy_in(args[0], self.group), *args[1:])

    def after_head(self, head: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Return the logits of all tokens, as a forward hook of the output head."""
        # every rank computes the same with them, so a gradient needs no message
        return exchange(
            output,
            lambda own: self.group.concatenated(own, own.dim() - 1, self.size),
            lambda gradient: gradient[..., self._tokens.start : self._tokens.stop],
        )
