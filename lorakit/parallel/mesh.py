"""All ranks of a run by named axes, and which ranks talk to each other along each.

Whatever scales a loss, cuts batches, seeds dropout or counts rows names the axis it means, and never the number of all
ranks: with an axis beside `data`, those are different numbers.
"""

from dataclasses import dataclass, field
from typing import Final

from lorakit.parallel.group import Group

AXES: Final = ("data", "pipeline", "sequence", "tensor")
"""from slowest to fastest: neighbouring ranks, on one machine, differ in the last axes first"""


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run. Only `data` is larger than 1 today; the recipe refuses the other axes above 1."""

    data: Group
    """ranks with other rows and the same part of the model: gradients and counts are summed over them"""
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
        """The ranks that this one talks to along each axis that has more than one."""
        return {axis: getattr(self, axis).ranks for axis, size in self.sizes.items() if size > 1}
