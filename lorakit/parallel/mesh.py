"""All ranks of a run by named axes, and which ranks talk to each other along each.

Whatever scales a loss, cuts batches, seeds dropout or counts rows names the axis it means, and never the number of all
ranks: with an axis beside `data`, those are different numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from torch import Tensor

from lorakit.parallel.group import Group

if TYPE_CHECKING:
    from lorakit.recipe import ParallelSection

AXES: Final = ("data", "pipeline", "sequence", "tensor")
"""from slowest to fastest: neighbouring ranks, on one machine, differ in the last axes first"""


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run."""

    data: Group  # ranks with other rows
    replicas: Group
    """ranks with other tokens and the same part of the model, `data` and `sequence` together: gradients and counts are
    summed over them, and a sharded base is sharded over them"""
    pipeline: Group = field(default_factory=Group)  # ranks with other layers, in the layers' order
    pipeline_backward: Group = field(default_factory=Group)
    """the ranks of `pipeline`, for messages against the layers' order"""
    grid: Tensor = field(default_factory=lambda: torch.arange(1).view(1, 1, 1, 1))  # all ranks, by axes
    sequence: Group = field(default_factory=Group)  # ranks with other tokens of the same rows
    tensor: Group = field(default_factory=Group)  # ranks with other parts of each weight

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks along each axis."""
        return {axis: getattr(self, axis).size for axis in AXES}


def make_mesh(world: Group, section: "ParallelSection") -> Mesh:
    """Return the mesh of all ranks, with the sizes of a `parallel` section. Collective."""
    timeout = message_timeout(section)
    others = (section.pipeline, section.sequence, section.tensor)
    grid = torch.arange(world.size).view(-1, *others)
    data = _make_group(world, grid, ("data",), timeout)
    return Mesh(
        data=data,
        replicas=data if section.sequence == 1 else _make_group(world, grid, ("data", "sequence"), timeout),
        **{axis: _make_group(world, grid, (axis,), timeout) for axis in AXES[1:]},
        pipeline_backward=_make_group(world, grid, ("pipeline",), timeout),
        grid=grid,
    )


def message_timeout(parallel: "ParallelSection") -> timedelta:
    """Return how long torch waits while the groups form, before the watchdog runs."""
    return timedelta(seconds=parallel.stuck_seconds + 60)


def _make_group(world: Group, grid: Tensor, axes: Sequence[str], timeout: timedelta) -> Group:
    """Return the group of the ranks that differ from this one along some axes alone. grid: ranks by axes."""
    along = [AXES.index(axis) for axis in axes]
    rows = grid.movedim(along, list(range(-len(axes), 0))).reshape(-1, math.prod(grid.shape[index] for index in along))
    if rows.shape[1] in (1, world.size):
        return Group() if rows.shape[1] == 1 else world
    device_group, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout)
    group = device_group
    if dist.get_backend() != "gloo":  # nccl sends tensors of GPUs only, and counts are on the CPU
        group, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout, "gloo")
    return Group(dist.get_rank(group), rows.shape[1], group=group, device_group=device_group)
