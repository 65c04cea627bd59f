"""Messages and bytes that a process sends in a step along `pipeline`, `sequence` and `tensor`: layers wait for them.

T: tokens of a process in a step. H: width of the hidden states. L: layers of a process. m: its micro-batches. n: ranks
along the axis. Messages are those that the engine counts (`collectives_by_axis` in run.json), for a base all of whose
layers are trained. Bytes are those that leave a process, in a ring of n.
"""

from dataclasses import dataclass

from lorakit.files.dtypes import MODEL_DTYPES
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
    axes = {
        "pipeline": (num_stages, pipeline_traffic),
        "sequence": (sharing_processes(setting.parallel, setting.num_processes), sequence_traffic),
        "tensor": (setting.tensor, tensor_traffic),
    }
    tokens = work.tokens_per_step / setting.num_processes * MODEL_DTYPES[dtype].itemsize
    forwards = 2 if checkpointing else 1  # a recomputed layer sends again
    return {
        axis: rule(stage, size, work.micro_batches, tokens, forwards) for axis, (size, rule) in axes.items() if size > 1
    }


def data_traffic(shapes: ModelShapes, setting: Setting, work: Workload) -> dict[str, AxisTraffic]:
    """Return the traffic of rows and shards under `data`; empty for one process."""
    rule = setting.layout.traffic
    if rule is None or setting.num_processes == 1:
        return {}
    traffic = rule(shapes, setting.num_processes, work.micro_batches)
    return {"data": AxisTraffic(round(traffic.num_messages), traffic.base_bytes + traffic.adapter_bytes)}


def pipeline_traffic(
    stage: PlannedStage, num_ranks: int, micro_batches: int, token_bytes: float, forwards: int
) -> AxisTraffic:
    """Return T H to the next stage and T H to the one before. token_bytes: of T values, one for each token."""
    borders = (not stage.is_last) + (not stage.is_first)
    return AxisTraffic(borders * micro_batches, borders * token_bytes * stage.shapes.hidden_size)


def sequence_traffic(
    stage: PlannedStage, num_ranks: int, micro_batches: int, token_bytes: float, forwards: int
) -> AxisTraffic:
    """Return for each layer one message of queries, keys and values and one of outputs, and the same in backward.

    Each is counted as wide as the queries, so fewer heads of keys and values send less.
    """
    shapes = stage.shapes
    times = shapes.num_layers * (forwards + 1)
    sent = 4 * shapes.attention_width * token_bytes * (num_ranks - 1) / num_ranks
    return AxisTraffic(2 * times * micro_batches, times * sent)


def tensor_traffic(
    stage: PlannedStage, num_ranks: int, micro_batches: int, token_bytes: float, forwards: int
) -> AxisTraffic:
    """Return for each block a gather of its input and a scatter of its output, and the same in backward.

    Each sends (n-1)/n of T H. The first layer reads the embedding, which needs no gradient and is summed once, in full.
    A recomputed layer gathers both inputs and scatters attention's output once more, after which nothing is saved, and
    the first one's input then needs a gradient, which is gathered. The end of the stage gathers T H; the loss scatters
    its gradient and sums two numbers per label, here messages without bytes. Once a step, uncut factors meet.
    """
    shapes = stage.shapes
    vocabulary = {use for tensor in shapes.tensors if tensor.name in shapes.cut_dims for use in tensor.uses}
    embedding, head = (EMBEDDING in vocabulary and stage.is_first), (HEAD in vocabulary and stage.is_last)
    has_gradient = not stage.is_first or forwards > 1  # the input of the first layer
    gathers = shapes.num_layers * (2 * forwards + 2) + has_gradient + 1
    scatters = shapes.num_layers * (forwards + 3) - (not has_gradient) + head
    sent = (gathers + scatters + 2 * embedding) * token_bytes * shapes.hidden_size
    uncut = sum(tensor.nbytes for tensor in shapes.adapter if tensor.name not in shapes.cut_dims)
    messages = (gathers + scatters + embedding + 2 * head) * micro_batches + 1
    return AxisTraffic(messages, (num_ranks - 1) / num_ranks * (sent + 2 * uncut))


def tokens_of_equal_traffic(shapes: ModelShapes, dtype: str, num_ranks: int) -> float:
    """Return the tokens of a process and micro-batch at which `tensor` sends as much as gathering the base does.

    With fewer, it sends less. Gathering sends P twice, whatever the tokens, and `tensor` four sums of T H for each
    layer, so n ranks with T tokens each send as much at T = P / (4 H L n), P and H in bytes: 3 H / n for a Llama.
    shapes: of the full base.
    """
    in_layers = sum(tensor.nbytes for tensor in shapes.base if any(isinstance(use, int) for use in tensor.uses))
    return in_layers / (4 * shapes.hidden_size * MODEL_DTYPES[dtype].itemsize * shapes.num_layers * num_ranks)
