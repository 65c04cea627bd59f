"""Messages and bytes that a process sends in a step along `pipeline`, `sequence` and `tensor`: layers wait for them.

T: tokens of a process in a step. H: width of the hidden states. L: layers. n: ranks along the axis. Messages are those
that a run counts (`collectives_by_axis` in run.json) and is checked by, for a base all of whose layers are trained.
Bytes are those that leave a process, in a ring of n.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lorakit.files.dtypes import MODEL_DTYPES
from lorakit.parallel.messages import (
    ByKind,
    CutModel,
    StepWork,
    bytes_that_leave,
    pipeline_messages,
    sequence_messages,
    tensor_messages,
)
from lorakit.parallel.sequence import kv_repeats
from lorakit.parallel.tensor.shards import CutDim
from lorakit.planning.memory import Setting
from lorakit.planning.model_shapes import EMBEDDING, HEAD, ModelShapes
from lorakit.planning.stages import PlannedStage
from lorakit.planning.workload import Workload, sharing_processes


@dataclass(frozen=True)
class AxisTraffic:
    """Messages of a process in a step, and the bytes in them that leave it."""

    num_messages: int
    num_bytes: float


def axis_traffic(
    stage: PlannedStage, num_stages: int, setting: Setting, work: Workload, dtype: str, *, checkpointing: bool
) -> dict[str, AxisTraffic]:
    """Return the traffic of each axis with more than one rank. setting: of the processes with the same layers."""
    itemsize, sequence = MODEL_DTYPES[dtype].itemsize, sharing_processes(setting.parallel, setting.num_processes)
    tokens = work.tokens_per_step / setting.num_processes
    step = planned_step(stage, work.micro_batches, tokens, itemsize, recomputes=checkpointing)
    sizes = {"pipeline": num_stages, "sequence": sequence, "tensor": setting.tensor}
    return {axis: _traffic(by_kind, sizes[axis]) for axis, by_kind in axis_messages(stage, step, sizes).items()}


def planned_step(
    stage: PlannedStage, micro_batches: int, num_tokens: float, itemsize: int, *, recomputes: bool
) -> StepWork:
    """Return a step of so many tokens in a stage all of whose layers are trained. itemsize: of hidden states."""
    return StepWork(
        micro_batches=micro_batches,
        num_tokens=num_tokens,
        token_bytes=stage.shapes.hidden_size * itemsize,
        num_layers=stage.shapes.num_layers,
        num_trained=stage.shapes.num_layers,
        recomputes=recomputes,
        is_first=stage.is_first,
        is_last=stage.is_last,
        sends_gradient=not stage.is_first,
        receives_gradient=not stage.is_last,
        trains_embedding=_trains_embedding(stage),
    )


def axis_messages(stage: PlannedStage, step: StepWork, sizes: Mapping[str, int]) -> dict[str, ByKind]:
    """Return what a process sends and receives along each axis with more than one rank. sizes: ranks along each."""
    shapes, itemsize = stage.shapes, step.token_bytes // stage.shapes.hidden_size
    messages = {}
    if sizes["pipeline"] > 1:
        messages["pipeline"] = pipeline_messages(step)
    if sizes["sequence"] > 1:
        attentions = [(attention_bytes(shapes, sizes["sequence"], itemsize), True)] * shapes.num_layers
        messages["sequence"] = sequence_messages(
            step.micro_batches, step.num_tokens, attentions, recomputes=step.recomputes
        )
    if sizes["tensor"] > 1:
        messages["tensor"] = tensor_messages(step, cut_model(stage, itemsize))
    return messages


def _traffic(by_kind: ByKind, num_ranks: int) -> AxisTraffic:
    calls = sum(messages.calls for kind, messages in by_kind.items() if kind != "receive")
    return AxisTraffic(round(calls), bytes_that_leave(by_kind, num_ranks))


def data_traffic(shapes: ModelShapes, setting: Setting, work: Workload) -> dict[str, AxisTraffic]:
    """Return the traffic of rows and shards under `data`; empty for one process."""
    rule = setting.layout.traffic
    if rule is None or setting.num_processes == 1:
        return {}
    traffic = rule(shapes, setting.num_processes, work.micro_batches)
    return {"data": AxisTraffic(round(traffic.num_messages), traffic.base_bytes + traffic.adapter_bytes)}


def attention_bytes(shapes: ModelShapes, num_ranks: int, itemsize: int) -> int:
    """Return the bytes of a token in a layer's two messages: queries, keys and values there, outputs back.

    Keys and values are repeated where there are fewer heads of them than ranks.
    """
    repeats = kv_repeats(shapes.num_heads, shapes.num_kv_heads, num_ranks) or 1
    return 2 * (shapes.num_heads + repeats * shapes.num_kv_heads) * shapes.head_size * itemsize


def cut_model(stage: PlannedStage, itemsize: int) -> CutModel:
    """Return what is cut of a transformer with two blocks in a layer, whose first layer reads the embedding itself."""
    shapes = stage.shapes
    vocabulary = {use for tensor in shapes.tensors if tensor.name in shapes.cut_dims for use in tensor.uses}
    embedding = EMBEDDING in vocabulary and stage.is_first
    return CutModel(
        num_blocks=2 * shapes.num_layers,
        num_summed=2 * shapes.num_layers,
        in_parts=True,
        embedding=embedding,
        scatters_embedding=embedding,
        head=HEAD in vocabulary and stage.is_last,
        uncut_bytes=sum(tensor.nbytes for tensor in shapes.adapter if tensor.name not in shapes.cut_dims),
        product_bytes=itemsize * _ranks_along(stage),
    )


def _ranks_along(stage: PlannedStage) -> int:
    """Return the ranks r of the layers that are cut by outputs, without those that the first block has.

    Gradients of their x A^T go along with those of x, which the first block has none of if the embedding is frozen.
    """
    shapes = stage.shapes
    factors = [tensor for tensor in shapes.adapter if tensor.name.endswith(".lora_A")]
    cut = [one for one in factors if shapes.cut_dims.get(one.name.replace(".lora_A", ".lora_B")) == CutDim(0)]
    first = (
        cut[0].name.rpartition(".")[0].rpartition(".")[0]
        if cut and stage.is_first and not _trains_embedding(stage)
        else None
    )
    return sum(one.shape[0] for one in cut if one.name.rpartition(".")[0].rpartition(".")[0] != first)


def _trains_embedding(stage: PlannedStage) -> bool:
    return stage.is_first and any(EMBEDDING in tensor.uses for tensor in stage.shapes.adapter)


def tokens_of_equal_traffic(shapes: ModelShapes, dtype: str, num_ranks: int) -> float:
    """Return the tokens of a process and micro-batch at which `tensor` sends as much as gathering the base does.

    With fewer, it sends less. Gathering sends P twice, whatever the tokens, and `tensor` four sums of T H for each
    layer, so n ranks with T tokens each send as much at T = P / (4 H L n), P and H in bytes: 3 H / n for a Llama.
    shapes: of the full base.
    """
    in_layers = sum(tensor.nbytes for tensor in shapes.base if any(isinstance(use, int) for use in tensor.uses))
    return in_layers / (4 * shapes.hidden_size * MODEL_DTYPES[dtype].itemsize * shapes.num_layers * num_ranks)
