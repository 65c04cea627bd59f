"""The stages of a pipeline in a plan: their tensors, their micro-batches under way, and the time in which they idle."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from lorakit.base.stages import split_costs
from lorakit.planning.activations import LiveBytes
from lorakit.planning.backends import LAYOUTS
from lorakit.planning.model_shapes import ROOT, ModelShapes, TensorShape
from lorakit.recipe import ParallelSection


@dataclass(frozen=True)
class PlannedStage:
    """One stage.

    shapes: of its tensors. share: its part of the layers. num_waiting: micro-batches whose activations are in memory at
    once. idle: time in which it waits for others, over the time in which it computes.
    """

    shapes: ModelShapes
    share: float = 1.0
    is_last: bool = True
    num_waiting: int = 1
    idle: float = 0.0

    def live(self, full: LiveBytes) -> LiveBytes:
        """Return the activations of this stage, given those of a micro-batch in the full model."""
        return LiveBytes(full.saved * self.share * self.num_waiting, full.head if self.is_last else 0.0, full.layer)


def num_stages(parallel: ParallelSection, backend: str, num_processes: int) -> int:
    """Return ``parallel.pipeline``, where a backend and so many processes can have as many stages; else 1."""
    divides = num_processes % (parallel.pipeline * parallel.sequence) == 0
    return parallel.pipeline if divides and LAYOUTS[backend].has_stages else 1


def stages_of(shapes: ModelShapes, number: int, micro_batches: int, label_share: float) -> list[PlannedStage]:
    """Return the stages of a base with its adapter, as training cuts it.

    Raises:
        RunError: fewer layers than stages.
    """
    if number == 1:
        return [PlannedStage(shapes)]
    embedding, head = (name and name.rpartition(".")[0] + "." for name in (shapes.embedding, shapes.head))
    in_layers = [t for t in shapes.tensors if t.group != ROOT and not (embedding and t.name.startswith(embedding))]
    layers = list(dict.fromkeys(tensor.group for tensor in in_layers))
    sizes = Counter[str]()
    for tensor in in_layers:
        sizes[tensor.group] += tensor.num_values
    trained = [t.group for t in shapes.adapter]
    first = next((index for index, layer in enumerate(layers) if layer in trained), len(layers))
    if embedding and any(tensor.name.startswith(embedding) for tensor in shapes.adapter):
        first = 0
    num_head = sum(tensor.num_values for tensor in shapes.tensors if tensor.name == shapes.head)
    ranges = split_costs([sizes[layer] for layer in layers], num_head * label_share, first, number)

    def tensors(stage: int, own: Iterable[str]) -> tuple[TensorShape, ...]:
        others = [prefix for prefix, at in ((embedding, 0), (head, number - 1)) if prefix and at == stage]
        elsewhere = tuple(prefix for prefix in (embedding, head) if prefix and prefix not in others)
        tied = stage == number - 1 and shapes.embedding == shapes.head
        return tuple(
            tensor
            for tensor in shapes.tensors
            if tensor.group in own or (tensor.group not in layers and (tied or not tensor.name.startswith(elsewhere)))
        )

    return [
        PlannedStage(
            replace(shapes, tensors=tensors(stage, {layers[index] for index in own}), num_layers=len(own)),
            share=len(own) / len(layers),
            is_last=stage == number - 1,
            num_waiting=min(number - stage, micro_batches),
            idle=(number - 1) / micro_batches,
        )
        for stage, own in enumerate(ranges)
    ]
