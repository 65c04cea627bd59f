"""The stages of a pipeline in a plan: their tensors and their micro-batches under way."""

from dataclasses import dataclass, replace

from lorakit.parallel.pipeline.cut import split_costs
from lorakit.planning.activations import LiveBytes
from lorakit.planning.model_shapes import EMBEDDING, HEAD, ModelShapes


@dataclass(frozen=True)
class PlannedStage:
    """One stage.

    shapes: of its tensors. share: its part of the layers. num_waiting: micro-batches whose activations are in memory at
    once.
    """

    shapes: ModelShapes
    share: float = 1.0
    is_last: bool = True
    num_waiting: int = 1

    def live(self, full: LiveBytes) -> LiveBytes:
        """Return the activations of this stage, given those of a micro-batch in the full model."""
        return LiveBytes(full.saved * self.share * self.num_waiting, full.head if self.is_last else 0.0, full.layer)


def stages_of(shapes: ModelShapes, number: int, micro_batches: int, label_share: float) -> list[PlannedStage]:
    """Return the stages of a base with its adapter, as training cuts it.

    Raises:
        RunError: fewer layers than stages.
    """
    if number == 1:
        return [PlannedStage(shapes)]
    in_layers = [(use, tensor) for tensor in shapes.tensors for use in tensor.uses if isinstance(use, int)]
    sizes = [0] * (1 + max((layer for layer, _ in in_layers), default=-1))
    for layer, tensor in in_layers:
        sizes[layer] += tensor.num_values
    trained = {use for tensor in shapes.adapter for use in tensor.uses}
    first = 0 if EMBEDDING in trained else min((use for use in trained if isinstance(use, int)), default=len(sizes))
    num_head = sum(tensor.num_values for tensor in shapes.tensors if HEAD in tensor.uses)
    ranges = split_costs(sizes, num_head * label_share, first, number)
    stages = []
    for stage, layers in enumerate(ranges):
        is_last = stage == number - 1
        own: set[int | str] = {*layers, *((EMBEDDING,) if stage == 0 else ()), *((HEAD,) if is_last else ())}
        tensors = tuple(tensor for tensor in shapes.tensors if not tensor.uses or tensor.uses & own)
        stages.append(
            PlannedStage(
                replace(shapes, tensors=tensors, num_layers=len(layers)),
                share=len(layers) / len(sizes),
                is_last=is_last,
                num_waiting=min(number - stage, micro_batches),
            )
        )
    return stages
