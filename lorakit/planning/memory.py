"""Bytes of one process by what they are for: one function per category, each with its formula.

P: the base. A: the adapter in float32. N: processes. What is measured rather than computed is what a micro-batch
allocates (trace.py) and what a process takes on CPUs before it holds anything (process.py).
"""

from dataclasses import dataclass, fields, replace
from typing import Final

from lorakit.planning.activations import LiveBytes
from lorakit.planning.backends import LAYOUTS, Layout, offloads_of
from lorakit.planning.communication import Gathered
from lorakit.planning.model_shapes import ModelShapes
from lorakit.planning.optimizer_state import OptimizerStateBytes, state_of
from lorakit.planning.process_overhead import HOST_OF_GPU_PROCESS, NCCL_BUFFERS
from lorakit.planning.sharding import adapter_bytes, base_bytes, sum_of, whole
from lorakit.recipe import ParallelSection
from lorakit.recipe.parallel import OffloadSection

MARGIN: Final = 0.25
"""How much more than expected a process may take: what is predicted is said to fit with this much room to spare."""


KEPT_LAYERS: Final = 5
"""Layers whose activations would fill the freed blocks that glibc 2.36 keeps; measured (benchmarks/plan.py)."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one process where it computes, at the worst moment of a step; ``host`` and ``disk`` come besides."""

    base: int
    adapter: int
    gradients: int
    optimizer: int
    activations: int
    """Kept for backward, with what a layer at work needs."""
    logits: int
    """Output head and loss, where they are the worst moment."""
    gathered: int
    """Split tensors that are whole for a while, and the messages they come in."""
    messages: int
    heap: int
    """On CPUs: freed blocks that the C library keeps and cannot use again."""
    process: int
    loading: int
    """Of the whole process while the base is brought in."""
    saving: int
    """Of the whole process while a checkpoint is written."""
    host: int = 0
    """On GPUs: of the process in host memory."""
    disk: int = 0
    """Checkpoints, patch, and what rests on a disk; of the whole machine's share of one process."""

    @property
    def training(self) -> int:
        return sum(getattr(self, name) for name in CATEGORIES)

    @property
    def peak(self) -> int:
        return max(self.training, self.loading, self.saving)


CATEGORIES: Final = tuple(
    field.name for field in fields(Memory) if field.name not in ("loading", "saving", "host", "disk")
)


@dataclass(frozen=True)
class Setting:
    """What memory depends on besides shapes: one way to run the recipe."""

    backend: str
    num_processes: int
    local_processes: int
    optimizer: str
    """As recipes name it."""
    parallel: ParallelSection
    on_gpu: bool
    converts: bool
    """The files hold another dtype than the run's."""
    stored_bytes: int
    """Of the base in its files, where they are mapped; 0 for a packed one, which is read tensor by tensor."""
    keeps: int
    """Checkpoints on disk."""
    layer_bytes: int = 0
    """What one layer keeps for backward when nothing is recomputed."""
    activations_on_host: int = 0
    """Bytes of layer inputs that wait in host memory for backward (train.activation_offload)."""

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.backend]

    @property
    def offloads(self) -> OffloadSection:
        return offloads_of(self.backend, self.parallel)


def memory_of(
    shapes: ModelShapes, setting: Setting, live: LiveBytes, evaluating: LiveBytes | None, process: int
) -> Memory:
    """Everything one process holds at the worst moment of a step."""
    n, layout = setting.num_processes, setting.layout
    start, layer, head = _phases(shapes, setting, live, evaluating)
    activations, logits, gathered = max(start, layer, head, key=sum)
    still = Memory(
        base=base(shapes, setting), adapter=adapter(shapes, setting), gradients=gradients(shapes, setting),
        optimizer=optimizer(shapes, setting), activations=activations, logits=logits, gathered=gathered,
        messages=layout.messages(shapes, n, setting.parallel), heap=heap(shapes, setting),
        process=process + communication(setting), loading=0, saving=0,
    )  # fmt: skip
    still = replace(still, loading=loading(shapes, setting, still), saving=saving(shapes, setting, still))
    return replace(still, host=host(shapes, setting), disk=disk(shapes, setting))


def base(shapes: ModelShapes, setting: Setting) -> int:
    """P, or this rank's parts of it; 0 when they rest elsewhere (offload.parameters). Streamed: two layers, and what is
    none."""
    if setting.offloads.streams:
        layers = shapes.base_bytes_of_layers()
        return base_bytes(shapes) - sum(layers) + 2 * max(layers)
    if setting.offloads.parameters != "none" and setting.on_gpu:
        return 0
    return sum_of(shapes.frozen, setting.layout.base, setting.num_processes)


def adapter(shapes: ModelShapes, setting: Setting) -> int:
    """A; A / N for fsdp2; A + A / N for zero3, which keeps it whole beside its parts."""
    if setting.layout.adapter_rests_with_base and setting.offloads.parameters != "none" and setting.on_gpu:
        return 0
    return sum_of(shapes.adapter, setting.layout.adapter, setting.num_processes)


def gradients(shapes: ModelShapes, setting: Setting) -> int:
    """A in float32, or A / N; 0 when the optimizer rests elsewhere."""
    if setting.offloads.optimizer != "none" and setting.on_gpu:
        return 0
    return setting.layout.gradients(shapes, setting.num_processes)


def optimizer(shapes: ModelShapes, setting: Setting) -> int:
    """AdamW: two moments, 2 A or 2 A / N in float32, and step counters; 0 when it rests elsewhere."""
    if setting.offloads.optimizer != "none" and setting.on_gpu:
        return 0
    return optimizer_state(shapes, setting).stays


def optimizer_state(shapes: ModelShapes, setting: Setting) -> OptimizerStateBytes:
    """Wherever it rests."""
    layout = setting.layout
    return state_of(
        setting.optimizer, shapes, layout.optimizer, setting.num_processes, layout.num_counters(shapes)
    )  # fmt: skip


def checkpoint_bytes(shapes: ModelShapes, setting: Setting) -> int:
    """A, what else is the adapter's own, and the whole optimizer state: 3 A with AdamW in float32."""
    state = state_of(setting.optimizer, shapes, whole, 1, 0)
    return adapter_bytes(shapes) + shapes.fixed_bytes + state.stays + state.paged


def heap(shapes: ModelShapes, setting: Setting) -> int:
    """As much as some layers keep for backward, where freed blocks are not given back at once.

    That is with whole bases on CPUs, unless they are packed: there weights in floats come and go.
    """
    if setting.on_gpu or setting.layout.splits_base or shapes.packing:
        return 0
    return KEPT_LAYERS * setting.layer_bytes


def communication(setting: Setting) -> int:
    """On GPUs the channels of nccl, once there are neighbours; gloo's are small."""
    return NCCL_BUFFERS if setting.on_gpu and setting.num_processes > 1 else 0


def loading(shapes: ModelShapes, setting: Setting, still: Memory) -> int:
    """What is held then (P or parts, A, the process), and what bringing it in needs besides.

    On CPUs a base in the dtype of its files is mapped from them; else the mapped files come on top of its copy. DDP
    then sends the whole base once, in two messages of 250 MB at a time. On GPUs files are read into host memory.
    A base that is packed takes one weight in floats at a time, wherever that is done.
    """
    held = still.base + still.adapter + still.process
    read_by_parts = setting.layout.splits_base or setting.offloads.streams
    mapped = setting.stored_bytes if setting.converts and not read_by_parts else 0
    return held + (0 if setting.on_gpu else mapped) + max(shapes.packing_bytes, setting.layout.loading(shapes))


def saving(shapes: ModelShapes, setting: Setting, still: Memory) -> int:
    """All but activations; on CPUs with whole copies of all that a checkpoint holds, about 3 A."""
    held = still.base + still.adapter + still.gradients + still.optimizer + still.messages + still.process
    return held + (0 if setting.on_gpu else checkpoint_bytes(shapes, setting))


def host(shapes: ModelShapes, setting: Setting) -> int:
    """In host memory of a GPU's process: libraries, the base while it is loaded whole, what rests there, about 3 A.

    Whole files are mapped, and shared by the processes of a machine; a converted base is each process's own; of a
    packed one there is one tensor at a time.
    """
    if not setting.on_gpu:
        return 0
    n, layout = setting.num_processes, setting.layout
    shared = 0 if layout.splits_base else setting.stored_bytes // setting.local_processes
    own = base_bytes(shapes) if setting.converts and not layout.splits_base else 0
    if shapes.packing:
        own = max(piece.nbytes for piece in shapes.frozen) + shapes.packing_bytes
    state = optimizer_state(shapes, setting)
    rests_here = setting.offloads.parameters in ("cpu", "stream")
    resting = state.paged + (sum_of(shapes.frozen, layout.base, n) if rests_here else 0)
    if setting.offloads.optimizer == "cpu":
        resting += state.stays + 2 * sum_of(shapes.adapter, layout.optimizer, n)
    waiting = resting + setting.activations_on_host + checkpoint_bytes(shapes, setting)
    return HOST_OF_GPU_PROCESS + max(shared + own, waiting)


def disk(shapes: ModelShapes, setting: Setting) -> int:
    """Per machine: each kept checkpoint and two more, the patch, and what rests there."""
    resting = sum_of(shapes.frozen, setting.layout.base, setting.num_processes)
    moved = resting if setting.offloads.parameters == "nvme" else 0
    if setting.offloads.optimizer == "nvme":
        moved += 2 * optimizer_state(shapes, setting).stays
    patch = adapter_bytes(shapes) + shapes.fixed_bytes
    return (setting.keeps + 2) * checkpoint_bytes(shapes, setting) + patch + moved * setting.local_processes


def _phases(
    shapes: ModelShapes, setting: Setting, live: LiveBytes, evaluating: LiveBytes | None
) -> tuple[tuple[int, int, int], tuple[int, int, int], tuple[int, int, int]]:
    """(activations, logits, gathered) in the three phases of a micro-batch that can be the worst."""
    gathered = _gathered(shapes, setting)
    saved = round(live.saved) - (setting.activations_on_host if setting.on_gpu else 0)
    logits = max(round(live.head), round(evaluating.head) - saved if evaluating else 0)
    return (
        (0, 0, gathered.start),
        (saved + round(live.layer), 0, gathered.layer),
        (saved, logits, gathered.head),
    )


def _gathered(shapes: ModelShapes, setting: Setting) -> Gathered:
    if not setting.layout.splits_base:
        return Gathered()
    return setting.layout.gathered(shapes, setting.num_processes, setting.parallel)
