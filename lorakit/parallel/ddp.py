"""The DDP backend: every rank has the full base, and the adapter's gradients are summed in one message a step.

An adapter's gradients are about 1 % of its base, so nothing is sent during backward, and torch's
DistributedDataParallel, which overlaps the two, is not needed. With `pipeline` and `tensor`, "full" is the rank's part.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import get_total_norm

from lorakit.parallel.adapter_state import AdapterState
from lorakit.parallel.group import Group
from lorakit.parallel.single import SingleEngine


class DdpEngine(SingleEngine):
    """A full copy of the model on every rank. Clip and update run on every rank alike."""

    def reduce(self, adapter: AdapterState) -> float:
        sum_gradients(list(adapter.tensors.values()), self.mesh.replicas)
        squares = self.axes.sum_gradients(lambda gradient: gradient)
        if squares is None:
            norm = float(get_total_norm(adapter.gradients()))
            squares = norm * norm
        return math.sqrt(self.mesh.pipeline.all_reduce_sum(squares)[0])

    def describe(self) -> dict[str, Any]:
        return {"engine": self.axes.describe() or "DDP", "backend": "ddp"}


def sum_gradients(tensors: Sequence[nn.Parameter], group: Group) -> None:
    """Replace each gradient by its sum over a group's ranks, in one message. None stays where no rank has one."""
    if group.size == 1 or not tensors:  # a stage may have nothing to train
        return
    parts = [(torch.zeros_like(t) if t.grad is None else t.grad).flatten() for t in tensors]
    counts = torch.tensor([float(tensor.grad is not None) for tensor in tensors], device=parts[0].device)
    flat = torch.cat([*parts, counts])
    dist.all_reduce(flat, group=group.device_group)
    *sums, counts = flat.split([*(tensor.numel() for tensor in tensors), len(tensors)])
    for tensor, total, count in zip(tensors, sums, counts.tolist(), strict=True):
        tensor.grad = total.view_as(tensor) if count else None
