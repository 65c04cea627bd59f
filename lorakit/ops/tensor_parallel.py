"""Compute with a part of each weight: copy inputs in, sum outputs, over the ranks that have the other parts.

A layer that is cut by outputs reads all of x, and its gradient of x is a partial sum. A layer that is cut by inputs
reads its own part of x, and its output is a partial sum. Between the two, nothing is sent (Megatron-LM, Shoeybi et al.
2019, arXiv 1909.08053): two messages for each layer of a transformer forward, and two backward.

A LoRA layer of the same cut adds no message: s (x A^T) B^T is cut, or a partial sum, as x W^T beside it is. Between the
blocks each rank may have some of the tokens alone (`ops.token_parts`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lorakit.ops.head_exchange import token_counts, token_range

COPY_NODE: Final = "_CopiedInputBackward"
"""autograd's node of an input that was copied in; `ops.recompute` looks through it, because it changes no value"""


@final
@dataclass(frozen=True, eq=False)
class WeightGroup:
    """The ranks that have the parts of each weight. group: for tensors where the model computes."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    def part(self, count: int) -> range:
        """Return this rank's part of ``count`` rows or columns: neighbours, as evenly as they divide."""
        return token_range(count, self.size, self.rank)

    def counts(self, count: int) -> list[int]:
        """Return how many of ``count`` rows or columns each rank has."""
        return token_counts(count, self.size)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, in a new one."""
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def maximum(self, tensor: Tensor) -> Tensor:
        """Return the largest value of the ranks at each index; overwrites the tensor."""
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor

    def concatenated(self, part: Tensor, dim: int, count: int) -> Tensor:
        """Return the ranks' parts side by side: ``count`` rows or columns, of which ``part`` has this rank's."""
        return self.gathered(part.movedim(dim, 0), count).movedim(0, dim).contiguous()

    def gathered(self, rows: Tensor, count: int) -> Tensor:
        """Return ``count`` rows, of which each rank has its part."""
        counts = self.counts(count)
        sent = rows.contiguous()
        if len(rows) < counts[0]:  # a message has one size for all ranks
            sent = rows.new_zeros(counts[0], *rows.shape[1:])
            sent[: len(rows)] = rows
        received = rows.new_empty(self.size * counts[0], *sent.shape[1:])
        dist.all_gather_into_tensor(received, sent, group=self.group)
        if counts[0] == counts[-1]:
            return received
        return torch.cat([part[:size] for part, size in zip(received.split(counts[0]), counts, strict=True)])

    def scattered(self, rows: Tensor) -> Tensor:
        """Return this rank's part of the rows of the sum of the ranks' tensors."""
        counts = self.counts(len(rows))
        sent = rows.contiguous()
        if counts[0] != counts[-1]:
            sent = rows.new_zeros(self.size, counts[0], *rows.shape[1:])
            for part, own in zip(sent, rows.split(counts), strict=True):
                part[: len(own)] = own
        total = rows.new_empty(counts[0], *rows.shape[1:])
        dist.reduce_scatter_tensor(total, sent.view(-1, *rows.shape[1:]), group=self.group)
        return total[: counts[self.rank]]


@final
@dataclass(frozen=True, eq=False)
class VocabularyPart:
    """A rank's part of an output head. count: tokens of the full vocabulary."""

    group: WeightGroup
    count: int

    @property
    def start(self) -> int:
        """The first token of the part."""
        return self.group.part(self.count).start

    @property
    def max_rows(self) -> int:
        """Tokens of the largest part of any rank, after which all ranks choose the same chunks."""
        return max(self.group.counts(self.count))


@final
class VocabularyRows:
    """Hooks of an embedding that has the rows of some tokens."""

    def __init__(self, tokens: range, add: Callable[[Tensor], Tensor]) -> None:
        """tokens: whose rows are here. add: returns the output of all ranks, of this rank's."""
        self._tokens, self._add = tokens, add
        self._absent: Tensor | None = None

    def before(self, embedding: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Give the embedding the indices of its own rows; the first one for a token of another rank."""
        rows = args[0] - self._tokens.start
        self._absent = (rows < 0) | (rows >= len(self._tokens))
        return (rows.masked_fill(self._absent, 0), *args[1:])

    def after(self, embedding: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Return each token's row, from the rank that has it."""
        assert self._absent is not None
        own, self._absent = output.masked_fill(self._absent[..., None], 0), None
        return self._add(own)


@final
class GatheredLogits:
    """Hooks of an output head that has the rows of some tokens: the logits of all tokens come out."""

    def __init__(self, part: VocabularyPart) -> None:
        self._group, self._count = part.group, part.count

    def before(self, head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Copy the hidden states in."""
        return (copy_in(args[0], self._group), *args[1:])

    def after(self, head: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Return the logits of the full vocabulary."""
        logits: Tensor = _GatheredColumns.apply(output, self._group, self._count)  # type: ignore[no-untyped-call]
        return logits


def copy_in(x: Tensor, group: WeightGroup) -> Tensor:
    """Return x; its gradient is the sum of the ranks' gradients."""
    copied: Tensor = _CopiedInput.apply(x, group)  # type: ignore[no-untyped-call]
    return copied


def sum_out(y: Tensor, group: WeightGroup) -> Tensor:
    """Return the sum of the ranks' y; the gradient of each is the sum's."""
    total: Tensor = _SummedOutput.apply(y, group)  # type: ignore[no-untyped-call]
    return total


@final
class _CopiedInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: WeightGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Any) -> Any:
        return ctx.group.sum(outer[0]), None


@final
class _SummedOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, group: WeightGroup) -> Tensor:
        return group.sum(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Any) -> Any:
        return outer[0], None


@final
class _GatheredColumns(torch.autograd.Function):
    """The ranks' columns side by side. Every rank computes the same with them, so a gradient needs no message."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: WeightGroup, count: int) -> Tensor:
        ctx.part = group.part(count)
        return group.concatenated(y, y.dim() - 1, count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Any) -> Any:
        return outer[0][..., ctx.part.start : ctx.part.stop], None, None
