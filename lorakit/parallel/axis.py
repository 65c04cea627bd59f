"""The axes of a mesh besides `data`: their interface, and what their ranks exchange.

An axis puts layers, hooks or wrappers of its own into a model, as quantised layers do. So `lora`, `ops`, `objectives`
and `base` know no axis, and an engine calls those with more than one rank without asking which they are.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lorakit.base.lazy import LazyBase
from lorakit.data.batch import Batch
from lorakit.lora.spec import AdapterSpec
from lorakit.objectives.cross_entropy import LossModel
from lorakit.parallel.group import Group, Mesh


class Axis(ABC):
    """One axis of the mesh, as one of its ranks uses it. What a subclass does not override changes nothing."""

    name: ClassVar[str]  # in the mesh and in the recipe's `parallel` section

    def __init__(self, mesh: Mesh, world: Group, device: torch.device) -> None:
        """Read the ranks along this axis from the mesh of all ranks, ``world``."""
        self.mesh = mesh
        self.world = world
        self.device = device
        self.group: Group = getattr(mesh, self.name)

    @staticmethod
    @abstractmethod
    def check_fits(model: nn.Module, spec: AdapterSpec | None, num_ranks: int) -> None:
        """Raise RunError unless the ranks can share a model, perhaps on meta. spec: of its adapter, if it has one."""

    @abstractmethod
    def cut(self, loss_model: LossModel, weights: LazyBase | None, label_share: float) -> LazyBase | None:
        """Leave in a model what this rank computes; return its weights. label_share: of tokens with labels."""

    def check_cut(self, loss_model: LossModel) -> None:  # noqa: B027 # most axes check nothing here
        """Raise RunError unless the cut model, once it has its weights, computes what the full one does. Collective."""

    def slice(self, batch: Batch) -> Batch:
        """Return what this rank computes of a micro-batch."""
        return batch

    def add_up(self, parts: Tensor) -> Tensor:
        """Return the sum of the ranks' sums over their tokens; the gradient of each is the sum's. Collective."""
        return parts

    def gather(self, name: str, value: Tensor) -> Tensor:
        """Return the full tensor of an adapter's tensor or its optimizer state, from this rank's. Collective."""
        return value

    def scatter(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's part of a full tensor: the inverse of `gather`."""
        return full

    def sum_gradients(self, local: Callable[[Tensor], Tensor]) -> float | None:
        """Add up the gradients of ranks that share weights, in place; return the sum of their squares. Collective."""
        return None

    def facts(self) -> dict[str, Any]:
        """Return what this rank has of the model, for the record of a run."""
        return {}


def axis_types() -> tuple[type[Axis], ...]:
    """Return the axes in the order in which they cut. Imported here, because they are subclasses of `Axis`."""
    from lorakit.parallel.pipeline.axis import PipelineAxis
    from lorakit.parallel.sequence.axis import SequenceAxis
    from lorakit.parallel.tensor.axis import TensorAxis

    return SequenceAxis, PipelineAxis, TensorAxis


def axes_of(mesh: Mesh, world: Group, device: torch.device) -> dict[str, Axis]:
    """Return the axes with more than one rank, by name, in the order in which they cut. world: all ranks."""
    axes = [axis_type(mesh, world, device) for axis_type in axis_types()]
    return {axis.name: axis for axis in axes if axis.group.size > 1}


def check_axes(model: nn.Module, spec: AdapterSpec | None, sizes: Mapping[str, int]) -> None:
    """Raise RunError unless ranks can share a model, perhaps on meta. sizes: axis -> ranks; 1 for a missing one."""
    for axis_type in axis_types():
        if (size := sizes.get(axis_type.name, 1)) > 1:
            axis_type.check_fits(model, spec, size)


def exchange(x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `forward` of x, such as its sum over ranks; its gradient is `backward` of the gradient that comes in."""
    return _Exchange.apply(x, forward, backward)  # type: ignore[no-untyped-call]


@final
class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.gradient = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Any) -> Any:
        return ctx.gradient(outer[0]), None, None
