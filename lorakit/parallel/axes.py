"""The axes of a mesh besides `data`, as one rank takes part in them. Every method is the identity without them.

An engine calls `Axes`. The order of micro-batches, and what is joined over stages, come from `mesh.pipeline`. What an
axis does is in its package: `sequence`, `pipeline`, `tensor`, each with a subclass of `Axis`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import reduce
from typing import Any, final

import torch
from torch import Tensor, nn

from lorakit.base.lazy import LazyBase
from lorakit.data.batch import Batch
from lorakit.lora.spec import AdapterSpec
from lorakit.objectives.cross_entropy import LossModel
from lorakit.parallel.axis import Axis
from lorakit.parallel.group import Group
from lorakit.parallel.mesh import Mesh
from lorakit.parallel.pipeline.schedule import StageSteps
from lorakit.parallel.pipeline.stage import StageLossModel


def axis_types() -> tuple[type[Axis], ...]:
    """Return the axes in the order in which they cut. Imported here: a loop without a recipe needs no pydantic."""
    from lorakit.parallel.pipeline.axis import PipelineAxis
    from lorakit.parallel.sequence.axis import SequenceAxis
    from lorakit.parallel.tensor.axis import TensorAxis

    return SequenceAxis, PipelineAxis, TensorAxis


def check_axes(model: nn.Module, spec: AdapterSpec | None, sizes: Mapping[str, int]) -> None:
    """Raise RunError unless ranks can share a model, perhaps on meta. sizes: axis -> ranks; 1 for a missing one."""
    for axis_type in axis_types():
        size = sizes.get(axis_type.name, 1)
        if size > 1:
            axis_type.check_fits(model, spec, size)


@final
class Axes:
    """The axes with more than one rank. Every method but `slice` and `scatter` is collective."""

    def __init__(self, mesh: Mesh, world: Group, device: torch.device) -> None:
        self._loss_model: LossModel | None = None
        is_cut = max(mesh.sequence.size, mesh.pipeline.size, mesh.tensor.size) > 1
        every = [axis_type(mesh, world, device) for axis_type in (axis_types() if is_cut else ())]
        self.by_name: dict[str, Axis] = {axis.name: axis for axis in every if axis.group.size > 1}

    def cut(self, loss_model: LossModel, label_share: float, weights: LazyBase | None) -> LazyBase | None:
        """Leave in a model what this rank computes; return its weights. label_share: of tokens with a label."""
        self._loss_model = loss_model
        chunked = loss_model.chunked
        for axis in self.by_name.values():
            weights = axis.cut(loss_model, weights, label_share)
        loss_model.chunked = chunked  # on every rank alike, also where another stage has the head
        return weights

    def check(self) -> None:
        """Raise RunError unless the filled model computes what the full one does. Call it before the first step."""
        assert self._loss_model is not None
        for axis in self.by_name.values():
            axis.check_cut(self._loss_model)

    def steps(self, wrapped: nn.Module) -> StageSteps:
        """Return forward and backward of micro-batches. wrapped: the engine's wrapper of the loss model."""
        stage = self._loss_model.stage if isinstance(self._loss_model, StageLossModel) else None
        return StageSteps(wrapped, stage, self._before_backward)

    def slice(self, batch: Batch) -> Batch:
        """Return what this rank computes of a micro-batch."""
        return reduce(lambda batch, axis: axis.slice(batch), self.by_name.values(), batch)

    def add_up(self, parts: Tensor) -> Tensor:
        """Return the sum of sums over this rank's tokens and those of ranks with other tokens of the same rows."""
        return reduce(lambda parts, axis: axis.add_up(parts), self.by_name.values(), parts)

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Compute every token of a call of the model's own forward on each rank, inside the block.

        Ranks that share the model's weights call it alike, and get the same logits.
        """
        with ExitStack() as contexts:
            for axis in self.by_name.values():
                contexts.enter_context(axis.decoding())
            yield

    def sum_gradients(self, local: Callable[[Tensor], Tensor]) -> float | None:
        """Add up the gradients of ranks that share weights, in place; return the sum of their squares, if any do."""
        sums = [axis.sum_gradients(local) for axis in self.by_name.values()]
        return next((each for each in sums if each is not None), None)

    def gather(self, name: str, value: Tensor) -> Tensor:
        """Return the full value of an adapter's tensor, or of its optimizer state, of which this rank has a part."""
        return reduce(lambda value, axis: axis.gather(name, value), self.by_name.values(), value)

    def scatter(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's part of a full value: the inverse of `gather`."""
        return reduce(lambda full, axis: axis.scatter(name, full), self.by_name.values(), full)

    def facts(self) -> dict[str, Any]:
        """Return this rank's layers and parts of weights, for the record of a run."""
        return {key: value for axis in self.by_name.values() for key, value in axis.facts().items()}

    def describe(self) -> str | None:
        """Return which part of the model this rank has, as text; None if it has the full model."""
        texts = [axis.describe() for axis in self.by_name.values()]
        return ", ".join(text for text in texts if text) or None

    def _before_backward(self, shape: tuple[int, ...]) -> None:
        for axis in self.by_name.values():
            axis.before_backward(shape)
