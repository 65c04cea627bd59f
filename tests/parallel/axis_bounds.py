"""The least and the most that a rank sends along each axis in a step, read from its part of the model, for tests.

They differ, because the first layer that is trained needs gradients in some of its parts alone, methods differ in what
goes along with a gradient, and parts are padded to one size.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from lorakit.base.layers import layer_lists, repeated_layers
from lorakit.lora import adapter_tensors
from lorakit.lora.targets import embedding_and_head
from lorakit.objectives.cross_entropy import LossModel
from lorakit.parallel.axis import Axis
from lorakit.parallel.engine import Engine
from lorakit.parallel.group import Mesh
from lorakit.parallel.sequence.axis import SequenceAxis, checked_kv_repeats
from tests.parallel.axis_messages import (
    ByKind,
    CutModel,
    Messages,
    StepWork,
    pipeline_messages,
    sequence_messages,
    tensor_messages,
)

if TYPE_CHECKING:  # at run time a loop without a recipe needs no pydantic
    from lorakit.parallel.pipeline.stage import Stage
    from lorakit.parallel.tensor.axis import TensorShards

Bounds = tuple[ByKind, ByKind]
"""the least and the most of each kind"""
SMALL: Final = {kind: Messages(math.inf, 65536) for kind in ("all_gather", "all_reduce", "broadcast")}
"""losses, norms and flags, which go along an axis that has all ranks"""


Attentions = Mapping[int, tuple[int, bool]]
"""of each attention's last call, by its module's id: bytes of a token in both messages of the axis `sequence`, and
whether gradients go through it"""


@contextmanager
def count_attentions() -> Iterator[Attentions]:
    """The attentions that are called in the block."""
    called: dict[int, tuple[int, bool]] = {}
    exchange = SequenceAxis.to_heads

    def counted(self: SequenceAxis, module: nn.Module, heads: Any, num_tokens: int) -> Any:
        query, key, value = heads
        repeats = checked_kv_repeats("", query.shape[1], key.shape[1], self.group.size)
        sizes = [query.shape[1] * (query.shape[3] + value.shape[3])]  # back goes the output of all heads
        sizes += [repeats * part.shape[1] * part.shape[3] for part in (key, value)]
        has_gradient = any(part.requires_grad for part in heads) and torch.is_grad_enabled()
        called[id(module)] = sum(sizes) * query.element_size(), has_gradient
        return exchange(self, module, heads, num_tokens)

    SequenceAxis.to_heads = counted  # type: ignore[method-assign]
    try:
        yield called
    finally:
        SequenceAxis.to_heads = exchange  # type: ignore[method-assign]


def message_problems(engine: Engine, counted: Mapping[str, Any], attentions: Attentions) -> list[str]:
    """Return the differences between the messages that a rank has counted in a step and those that its axes need."""
    step = counted["counted_step"].values()
    bounds = expected_messages(engine._loss_model, engine.axes, engine.mesh, attentions, *step)
    problems = [f"messages among ranks {ranks}, which are no axis" for ranks in counted["groups_of_no_axis"]]
    for axis, (least, most) in bounds.items():
        problems += differences(axis, least, most, counted["collectives_by_axis"].get(axis, {}))
    return problems


def differences(axis: str, least: ByKind, most: ByKind, sent: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Yield a line for each kind of message along an axis that is not within its bounds."""
    none = Messages(0, 0)
    for kind in sorted({*most, *sent}):
        low, high = least.get(kind, none), most.get(kind, none)
        calls, num_bytes = (sent.get(kind, {}).get(key, 0) for key in ("calls", "bytes"))
        if not (low.calls <= calls <= high.calls and low.num_bytes <= num_bytes <= high.num_bytes):
            yield (
                f"along {axis}: {calls} {kind} of {num_bytes} bytes, not {low.calls:g} to {high.calls:g} of"
                f" {low.num_bytes:g} to {high.num_bytes:g}"
            )


def expected_messages(
    loss_model: LossModel, axes: Mapping[str, Axis], mesh: Mesh, called: Attentions, micro_batches: int, num_tokens: int
) -> Mapping[str, Bounds]:
    """Return axis -> what this rank sends in a step of so many micro-batches and tokens of its own."""
    pipeline, tensor = (axes.get(name) for name in ("pipeline", "tensor"))
    stage: Stage | None = getattr(pipeline, "stage", None)
    parts: TensorShards | None = getattr(tensor, "shards", None)
    bounds: dict[str, Bounds] = {}
    if mesh.pipeline.size > 1:
        exact = pipeline_messages(_work(loss_model, stage, micro_batches, num_tokens, 0))
        bounds["pipeline"] = exact, {**SMALL, **exact}
    if mesh.sequence.size > 1:
        bounds["sequence"] = _sequence_bounds(loss_model, stage, called, micro_batches, num_tokens)
    if parts is not None:
        bounds["tensor"] = _tensor_bounds(loss_model, stage, parts, micro_batches, num_tokens)
    return bounds


def _work(
    loss_model: LossModel, stage: "Stage | None", micro_batches: int, num_tokens: int, num_trained: int
) -> StepWork:
    model = loss_model.model
    return StepWork(
        micro_batches=micro_batches,
        num_tokens=num_tokens,
        token_bytes=_token_bytes(model),
        num_layers=sum(1 for _ in repeated_layers(model)),
        num_trained=num_trained,
        recomputes=_recomputes(model),
        is_first=stage is None or stage.is_first,
        is_last=stage is None or stage.is_last,
        sends_gradient=stage is not None and stage.sends_gradient,
        receives_gradient=stage is not None and stage.receives_gradient,
        trains_embedding=(stage is None or stage.is_first) and _trains_embedding(model),
    )


def _sequence_bounds(
    loss_model: LossModel, stage: "Stage | None", called: Attentions, micro_batches: int, num_tokens: int
) -> Bounds:
    """Return what the attentions of the last forward send. Each layer has one at least."""
    model = loss_model.model
    fewest, _ = _trained_layers(loss_model, stage)
    num_layers = sum(1 for _ in repeated_layers(model))
    attentions = sorted(called.values(), key=lambda one: not one[1])
    recomputes, absent = _recomputes(model), [(0, False)] * (num_layers - len(attentions))
    needed = [(size, has_gradient or index < fewest) for index, (size, has_gradient) in enumerate(attentions + absent)]
    least = sequence_messages(micro_batches, num_tokens, needed, recomputes=False)
    # of a line that does not divide, a rank receives more than it has: up to one token more
    most = sequence_messages(micro_batches, num_tokens + micro_batches, attentions, recomputes=recomputes)
    return least, most


def _tensor_bounds(
    loss_model: LossModel, stage: "Stage | None", parts: "TensorShards", micro_batches: int, num_tokens: int
) -> Bounds:
    from lorakit.parallel.tensor.plan import EXPERTS, INPUTS, SHARED, block_of, mixture_of

    model, num_ranks = loss_model.model, parts.group.size
    fewest, most_layers = _trained_layers(loss_model, stage)
    uncut = sum(
        tensor.numel() * 4 * (1 if name not in parts.cuts else num_ranks // parts.cuts[name].copies)
        for name, tensor in adapter_tensors(model).items()
        if name not in parts.cuts or parts.cuts[name].copies > 1
    )
    has_embedding = stage is None or stage.is_first
    is_last = stage is None or stage.is_last
    head = parts.vocabulary is not None and is_last
    cut = CutModel(
        num_blocks=len(
            {
                mixture_of(name, parts.plan) or block_of(name)
                for name, what in parts.plan.items()
                if what not in (INPUTS, SHARED)
            }
        ),
        num_summed=sum(
            what == EXPERTS or (what == INPUTS and mixture_of(name, parts.plan) is None)
            for name, what in parts.plan.items()
        ),
        embedding=has_embedding and f"{embedding_and_head(model)[0]}.weight" in parts.cuts,
        head=head and loss_model.chunked,
        uncut_bytes=0.0,
    )
    work = _work(loss_model, stage, micro_batches, num_tokens, fewest)
    full = replace(work, num_trained=most_layers)
    # with the gradients go a sum of squares and a checksum of chosen experts
    least = dict(tensor_messages(work, cut))
    most = dict(tensor_messages(full, replace(cut, uncut_bytes=uncut + 8.0)))
    # an input of the first layer needs a gradient where a norm before it is trained
    _add(most, "all_reduce", micro_batches, full.num_tokens * full.token_bytes)
    from lorakit.parallel.tensor.partial_sums import TensorParallelLoraLinear

    times = micro_batches * (1 + work.recomputes)
    for layer in model.modules():  # squares of a merged weight's columns
        if isinstance(layer, TensorParallelLoraLinear) and hasattr(layer, "lora_magnitude_vector"):
            _add(most, "all_reduce", times, 4 * times * layer.out_features)
    if cut.head:  # labels of a chunk at a time, of some micro-batches none
        _add(least, "all_reduce", -2 * micro_batches, -num_tokens * work.token_bytes)  # gradients of labelled tokens
        _add(most, "all_reduce", 2 * num_tokens, 20 * num_tokens)
    elif head:  # logits of the full vocabulary
        count = parts.vocabulary.size if parts.vocabulary else 0
        logits = full.num_tokens * (count + num_ranks) * 4
        _add(most, "all_gather", micro_batches, logits)
        _add(most, "all_reduce", micro_batches, full.num_tokens * full.token_bytes)
    return least, most


def _add(by_kind: dict[str, Messages], kind: str, calls: float, num_bytes: float) -> None:
    before = by_kind.get(kind, Messages(0, 0))
    by_kind[kind] = Messages(before.calls + calls, before.num_bytes + num_bytes)


def _trained_layers(loss_model: LossModel, stage: "Stage | None") -> tuple[int, int]:
    """Return the least and the most layers of this rank that gradients go through, from end to end."""
    model = loss_model.model
    layers = list(repeated_layers(model))
    is_first = stage is None or stage.is_first
    if (stage is not None and stage.sends_gradient) or (is_first and _trains_embedding(model)):
        return len(layers), len(layers)
    if len(list(layer_lists(model))) != 1:
        return 0, len(layers)
    first = [*map(_trains, layers), True].index(True)
    above = max(0, len(layers) - first - 1)
    # gradients of a recomputed layer go back to the embedding
    return above, len(layers) if _recomputes(model) else len(layers) - first


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _trains_embedding(model: nn.Module) -> bool:
    return _trains(model.get_input_embeddings())  # type: ignore[operator]


def _recomputes(model: nn.Module) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())


def _token_bytes(model: nn.Module) -> int:
    config: Any = model.config
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point() and not p.requires_grad)
    return int(config.get_text_config().hidden_size) * dtype.itemsize
