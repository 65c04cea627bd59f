"""The axis `pipeline`, as an engine uses it, and the cut of a model into stages, from its embedding to its head."""

from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar, final

import torch
from torch import nn

from lorakit.base.layers import layer_lists
from lorakit.base.lazy import LazyBase
from lorakit.base.quantized import count_parameters
from lorakit.errors import RunError
from lorakit.lora.inject import adapter_tensors, replace_modules
from lorakit.lora.spec import AdapterSpec
from lorakit.objectives.cross_entropy import LossModel
from lorakit.parallel.axis import Axis
from lorakit.parallel.group import Mesh
from lorakit.parallel.pipeline.stage import Stage, StageLossModel


@final
class PipelineAxis(Axis):
    """Ranks with other layers, in the layers' order."""

    name: ClassVar[str] = "pipeline"
    stage: Stage  # the layers that are here, from `cut` on

    @staticmethod
    def check_fits(model: nn.Module, spec: AdapterSpec | None, num_ranks: int) -> None:
        split_layers(model, num_ranks, 1.0)
        ends = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
        uses = [id(p) for module in (*decoder_layers(model), *ends) for p in module.parameters()]
        shared = [name for name, tensor in adapter_tensors(model).items() if uses.count(id(tensor)) != 1]
        if shared:  # as with a tied head; gradients of several stages are not added
            remedy = "leave embedding, head and norms untrained, or leave out pipeline"
            raise RunError(f"parallel.pipeline: {shared[0]} would be in several stages; {remedy}")
        if spec is not None and spec.new_tokens:
            why = f"are compared with the base, and the base has no {next(iter(spec.new_tokens))!r}"
            raise RunError(f"parallel.pipeline: {num_ranks} stages {why}; leave out pipeline or adapter.new_tokens")

    def cut(self, loss_model: LossModel, weights: LazyBase | None, label_share: float) -> LazyBase | None:
        model = loss_model.model
        self.stage = self.world.run_on_all(lambda: cut_stage(model, self.mesh, self.device, label_share))
        StageLossModel.of(loss_model, self.stage)
        return weights

    def facts(self) -> dict[str, Any]:
        stage = self.stage
        facts = {
            "number": stage.ranks.rank,
            "layers": [stage.layers.start, stage.layers.stop],
            "is_first": stage.is_first,
            "is_last": stage.is_last,
            "sends_gradient": stage.sends_gradient,
            "receives_gradient": stage.receives_gradient,
        }
        return {"stage": facts}


def cut_stage(model: nn.Module, mesh: Mesh, device: torch.device, label_share: float) -> Stage:
    """Leave in a model the layers of this process's stage, or raise RunError. label_share: of the tokens."""
    num_stages = mesh.pipeline.size
    ranges = split_layers(model, num_stages, label_share)
    first = _first_trained_layer(model)
    first_stage = next((number for number, layers in enumerate(ranges) if first < layers.stop), num_stages - 1)
    stage = Stage(model, ranges[mesh.pipeline.rank], first_stage, mesh, device)
    if not stage.is_first:
        replace_modules(model, {model.get_input_embeddings(): nn.Module()})  # type: ignore[operator]
    if not stage.is_last:
        replace_modules(model, {model.get_output_embeddings(): nn.Module()})  # type: ignore[operator]
    return stage


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the list of a decoder's layers. Raises RunError unless there is exactly one between embedding and head."""
    lists = list(layer_lists(model))
    if len(lists) != 1 or getattr(model, "base_model", model) is model:
        why = "is not one list of layers between an embedding and a head"
        raise RunError(f"parallel.pipeline: {type(model).__name__} {why}; leave it out")
    return lists[0]


def split_layers(model: nn.Module, num_stages: int, label_share: float) -> list[range]:
    """Return the indices of each stage's layers, such that the slowest stage is as fast as can be.

    Cost is the number of weights that a token goes through: forward, and backward from the first layer on that has
    something to train. The head's is counted for the label_share of the tokens. Raises RunError: it cannot be cut.
    """
    layers = decoder_layers(model)
    first = _first_trained_layer(model)
    head = count_parameters(model.get_output_embeddings())  # type: ignore[operator]
    return split_costs([count_parameters(layer) for layer in layers], head * label_share, first, num_stages)


def split_costs(num_weights: Sequence[int], head: float, first_trained: int, num_stages: int) -> list[range]:
    """Return each stage's layers, or raise RunError. first_trained: the first layer that gradients go through."""
    count = len(num_weights)
    if count < num_stages:
        raise RunError(f"parallel.pipeline: {num_stages} stages need as many layers, and this base has {count}")
    costs = [(1.0 + (index >= first_trained)) * number for index, number in enumerate(num_weights)]
    costs[-1] += 2.0 * head

    @cache
    def best(stop: int, stages: int) -> tuple[float, list[range]]:
        """Return the ranges of neighbours, none empty, whose largest sum is the smallest possible, and that sum."""
        if stages == 1:
            return sum(costs[:stop]), [range(stop)]
        starts = range(stages - 1, stop)
        largest, start = min((max(best(start, stages - 1)[0], sum(costs[start:stop])), start) for start in starts)
        return largest, [*best(start, stages - 1)[1], range(start, stop)]

    return best(count, num_stages)[1]


def _first_trained_layer(model: nn.Module) -> int:
    """Return the index of the first layer through which gradients go; the number of layers if only the head learns."""
    if _trains(model.get_input_embeddings()):  # type: ignore[operator]
        return 0
    return [*map(_trains, decoder_layers(model)), True].index(True)


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
