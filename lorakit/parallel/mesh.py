"""All ranks of a run by named axes, and which ranks talk to each other along each.

Whatever scales a loss, cuts batches, seeds dropout or counts rows names the axis it means, and never the number of all
ranks: with an axis beside `data`, those are different numbers.
"""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from lorakit.parallel.group import Group

AXES: Final = ("data", "pipeline", "sequence", "tensor")
"""from slowest to fastest: neighbouring ranks, on one machine, differ in the last axes first"""


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run. `data` and `sequence` may be larger than 1; the recipe refuses the other axes above 1."""

    data: Group
    """ranks with other rows"""
    tokens: Group
    """ranks with other tokens and the same part of the model, `data` and `sequence` together: gradients and counts are
    summed over them, and a sharded base is sharded over them"""
    pipeline: Group = field(default_factory=Group)
    """ranks with other layers"""
    sequence: Group = field(default_factory=Group)
    """ranks with other tokens of the same rows"""
    tensor: Group = field(default_factory=Group)
    """ranks with other parts of each weight"""

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks along each axis."""
        return {axis: getattr(self, axis).size for axis in AXES}

    @property
    def ranks(self) -> dict[str, tuple[int, ...]]:
        """The ranks that this one talks to, by axis. `data` is `tokens` here, unless ranks share lines."""
        groups = {"tokens": self.tokens, **{axis: getattr(self, axis) for axis in AXES}}
        return {
            name: group.ranks
            for name, group in groups.items()
            if group.size > 1 and (name == "tokens" or group is not self.tokens)
        }


def make_mesh(world: Group, sequence: int, timeout: timedelta) -> Mesh:
    """Return the mesh of all ranks, of which each ``sequence`` neighbours share the tokens of a row. Collective.

    timeout: of a message.
    """
    if sequence == 1:
        return Mesh(data=world, tokens=world)
    number, rank = divmod(world.rank, sequence)
    # every rank makes every group, because torch requires it; `data` counts on the CPU, and `sequence` sends heads from
    # where the model computes, through the default group's backend
    neighbours = [
        dist.new_group(list(range(first, first + sequence)), timeout=timeout)
        for first in range(0, world.size, sequence)
    ]
    others = [
        dist.new_group(list(range(first, world.size, sequence)), timeout=timeout, backend="gloo")
        for first in range(sequence)
    ]
    return Mesh(
        data=Group(number, world.size // sequence, group=others[rank]),
        tokens=world,
        sequence=Group(rank, sequence, group=neighbours[number]),
    )
