"""Compute with a part of each weight: copy inputs in, sum outputs, over the ranks that have the other parts.

A layer that is cut by outputs reads all of x, and its gradient of x is a partial sum. A layer that is cut by inputs
reads its own part of x, and its output is a partial sum. Between the two, nothing is sent (Megatron-LM, Shoeybi et al.
2019, arXiv 1909.08053): two messages for each layer of a transformer forward, and two backward.

A LoRA layer of the same cut adds no message: s (x A^T) B^T is cut, or a partial sum, as x W^T beside it is. Between the
blocks each rank may have some of the tokens alone (`megatron_sp`).
"""

from dataclasses import dataclass, field, replace
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lorakit.lora import LoraLinear
from lorakit.lora.methods import LayerCall
from lorakit.ops.dropout import DrawnMask, DropoutMask, column_keys
from lorakit.ops.recompute import with_gradient
from lorakit.parallel.axis import even_counts, even_range, exchange


@final
@dataclass(frozen=True, eq=False)
class WeightGroup:
    """The ranks that have the parts of each weight. group: for tensors where the model computes."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    def part(self, count: int) -> range:
        """Return this rank's part of ``count`` rows or columns: neighbours, as evenly as they divide."""
        return even_range(count, self.size, self.rank)

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
        counts = even_counts(count, self.size)
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
        counts = even_counts(len(rows), self.size)
        sent = rows.contiguous()
        if counts[0] != counts[-1]:
            sent = rows.new_zeros(self.size, counts[0], *rows.shape[1:])
            for part, own in zip(sent, rows.split(counts), strict=True):
                part[: len(own)] = own
        total = rows.new_empty(counts[0], *rows.shape[1:])
        dist.reduce_scatter_tensor(total, sent.view(-1, *rows.shape[1:]), group=self.group)
        return total[: counts[self.rank]]


def copy_in(x: Tensor, group: WeightGroup) -> Tensor:
    """Return x; its gradient is the sum of the ranks' gradients."""
    return with_gradient(x, group.sum)


def sum_out(y: Tensor, group: WeightGroup) -> Tensor:
    """Return the sum of the ranks' y; the gradient of each is the sum's."""
    return exchange(y, group.sum, lambda gradient: gradient)


@final
class TensorParallelLoraLinear(LoraLinear):
    """A layer cut by inputs: y is a partial sum, which a hook adds up. One cut by outputs stays a `LoraLinear`."""

    def __init__(self, layer: LoraLinear, group: WeightGroup) -> None:
        """Take over the attributes of a layer, whose parameters are cut already. group: ranks with other columns."""
        nn.Module.__init__(self)
        self.__dict__.update(layer.__dict__)
        self._group = group
        self._columns = group.part(layer.in_features)
        self.adds_bias = True  # False where another rank adds the bias to the sum

    def inputs(self, x: Tensor) -> LayerCall:
        call = super().inputs(x)
        return _PartialCall(**vars(call), group=self._group)

    def mask_of(self, x: Tensor) -> DropoutMask | DrawnMask:
        mask = super().mask_of(x)
        if isinstance(mask, DrawnMask):
            return mask
        return replace(mask, column_keys=column_keys(self.name, self._columns, x.device))

    def cast_bias(self) -> Tensor | None:
        bias = super().cast_bias()
        # times zero and not None, so that a trainable bias has a gradient of zero and not none
        return bias if bias is None or self.adds_bias else bias * 0


@dataclass(frozen=True, eq=False)
class _PartialCall(LayerCall):
    group: WeightGroup = field(kw_only=True)

    def change_of_squared_norms(self, A: Tensor, B: Tensor, s: float) -> Tensor:
        return self.group.sum(super().change_of_squared_norms(A, B, s))
