"""Bytes of one process by category: one function per category, each with its formula.

P: bytes of the base. A: bytes of the adapter in float32. N: processes. Two inputs are measured instead of computed:
the activations of a micro-batch (activations.py), and the constants of a process without its base, below.
"""

from dataclasses import dataclass, fields, replace
from typing import Final

from lorakit.planning.activations import LiveBytes
from lorakit.planning.backends import BACKENDS, BackendRules, offloads_of
from lorakit.planning.model_shapes import ModelShapes
from lorakit.planning.sharding import (
    OptimizerStateBytes,
    adapter_bytes,
    base_bytes,
    optimizer_state_bytes,
    shard_bytes,
    unsharded,
)
from lorakit.quant.bnb import OPTIMIZERS as BNB_OPTIMIZERS
from lorakit.recipe import ParallelSection
from lorakit.recipe.parallel import OffloadSection

CPU_PROCESS: Final = {"float32": 450_000_000, "bfloat16": 520_000_000, "float16": 520_000_000}
"""dtype -> bytes of interpreter, torch, transformers and lorakit after a step, with the kernels that oneDNN compiles in
16 bits; from `python -m benchmarks.plan --process`"""
PACKAGE_BYTES: Final = {"deepspeed": 11_000_000, "bitsandbytes": 31_000_000}
"""package -> bytes that it adds to a CPU process; measured in the same way"""
CUDA_CONTEXT: Final = 500_000_000  # GPU memory of driver, kernels and cuBLAS's workspace; an estimate, not measured
NCCL_BUFFERS: Final = 400_000_000  # GPU memory of the channels between two or more processes; not measured
HOST_OF_GPU_PROCESS: Final = 3_000_000_000  # host memory of libraries with their GPU code; not measured
MARGIN: Final = 0.25
"""Free share required above the predicted peak before a candidate counts as fitting."""
HEAP_LAYERS: Final = 5
"""Layers whose saved activations equal the freed blocks that glibc 2.36 does not return; from benchmarks/plan.py."""


@dataclass(frozen=True)
class Memory:
    """Peak bytes of one process on its computing device, by category; ``host`` and ``disk`` are counted apart."""

    base: int
    adapter: int
    gradients: int
    optimizer: int
    activations: int
    """Saved for backward, plus the temporaries of the layer being computed."""
    logits: int
    """Output head and loss, if the step's peak is there."""
    gathered: int
    """Sharded tensors while they are gathered, and the messages they arrive in."""
    messages: int
    heap: int
    """On CPUs: freed blocks that the C library neither reuses nor returns."""
    process: int
    loading: int
    """Peak of the process while the base is loaded."""
    saving: int
    """Peak of the process while a checkpoint is written."""
    host: int = 0
    """On GPUs: host memory of the process."""
    disk: int = 0
    """Per machine: checkpoints, patch, and state offloaded to disk."""

    @property
    def training(self) -> int:
        """Peak of a training step."""
        return sum(getattr(self, name) for name in CATEGORIES)

    @property
    def peak(self) -> int:
        return max(self.training, self.loading, self.saving)


CATEGORIES: Final = tuple(
    field.name for field in fields(Memory) if field.name not in ("loading", "saving", "host", "disk")
)


@dataclass(frozen=True)
class Setting:
    """Everything besides tensor shapes that decides memory: backend, processes, optimizer, offloading."""

    backend: str
    num_processes: int
    """Processes with the same part of each weight."""
    local_processes: int
    """Processes on one machine."""
    optimizer: str
    """Name as in recipes."""
    parallel: ParallelSection
    on_gpu: bool
    dtype: str
    converts: bool
    """Whether the files store another dtype than the run's."""
    stored_bytes: int
    """Bytes of memory-mapped base files; 0 for a quantised base, which is read tensor by tensor."""
    num_checkpoints: int
    """Checkpoints that stay on disk."""
    layer_bytes: int = 0
    """Bytes that one layer saves for backward without recomputation."""
    tensor: int = 1
    """Processes that share each weight."""
    activations_on_host: int = 0
    """Bytes of layer inputs in host memory until backward (train.activation_offload)."""

    @property
    def rules(self) -> BackendRules:
        return BACKENDS[self.backend]

    @property
    def offloads(self) -> OffloadSection:
        return offloads_of(self.backend, self.parallel)


def memory_of(shapes: ModelShapes, setting: Setting, training: LiveBytes, evaluation: LiveBytes | None) -> Memory:
    """Return the memory of one process at the peak of a step, and while it loads and saves.

    adapter: A; A / N under fsdp2; A + A / N under zero3, which stores the full adapter beside its shards. gradients: A
    or A / N. optimizer: such as AdamW's two moments, 2 A or 2 A / N in float32, and step counters.
    """
    rules = setting.rules
    num_ranks = setting.num_processes
    has_optimizer = setting.offloads.optimizer == "none" or not setting.on_gpu
    has_adapter = setting.offloads.parameters == "none" or not (setting.on_gpu and rules.offloads_adapter)
    activations, logits, gathered = max(_phases(shapes, setting, training, evaluation), key=sum)
    step = Memory(
        base=resident_base_bytes(shapes, setting),
        adapter=shard_bytes(shapes.adapter, rules.adapter, num_ranks) if has_adapter else 0,
        gradients=rules.gradients(shapes, num_ranks) if has_optimizer else 0,
        optimizer=_optimizer_state(shapes, setting).resident if has_optimizer else 0,
        activations=activations,
        logits=logits,
        gathered=gathered,
        messages=rules.messages(shapes, num_ranks, setting.parallel),
        heap=heap_bytes(shapes, setting),
        process=process_bytes(shapes, setting),
        loading=0,
        saving=0,
    )
    return replace(
        step,
        loading=loading_bytes(shapes, setting, step),
        saving=saving_bytes(shapes, setting, step),
        host=host_bytes(shapes, setting),
        disk=disk_bytes(shapes, setting),
    )


def resident_base_bytes(shapes: ModelShapes, setting: Setting) -> int:
    """Return the bytes of base weights on the device: P, this rank's shards, or 0 if offloaded.

    With ``stream``: twice the largest layer, plus every tensor outside the layers.
    """
    if setting.offloads.streams:
        layers = shapes.base_bytes_of_layers()
        return base_bytes(shapes) - sum(layers) + 2 * max(layers)
    if setting.offloads.parameters != "none" and setting.on_gpu:
        return 0
    return shard_bytes(shapes.frozen, setting.rules.base, setting.num_processes)


def checkpoint_bytes(shapes: ModelShapes, setting: Setting) -> int:
    """Return the bytes of a checkpoint: A + fixed tensors + unsharded optimizer state; 3 A with AdamW in float32."""
    state = optimizer_state_bytes(setting.optimizer, shapes, unsharded, 1, 0)
    return adapter_bytes(shapes) + shapes.fixed_bytes + state.resident + state.paged


def heap_bytes(shapes: ModelShapes, setting: Setting) -> int:
    """Return the freed blocks of the C heap: the saved activations of HEAP_LAYERS layers.

    0 where lorakit makes the C library return freed blocks at once: with a sharded or quantised base, because gathered
    or dequantised weights are allocated and freed all the time.
    """
    if setting.on_gpu or setting.rules.splits_base or shapes.quantization:
        return 0
    return HEAP_LAYERS * setting.layer_bytes


def process_bytes(shapes: ModelShapes, setting: Setting) -> int:
    """Return the bytes of a process without its base: of its libraries, and on GPUs of context and channels."""
    if setting.on_gpu:
        return CUDA_CONTEXT + (NCCL_BUFFERS if setting.num_processes * setting.tensor > 1 else 0)
    quantizes = bool(shapes.quantization) or setting.optimizer in BNB_OPTIMIZERS
    packages = (setting.rules.package, "bitsandbytes" if quantizes else None)
    return CPU_PROCESS[setting.dtype] + sum(PACKAGE_BYTES[package] for package in packages if package is not None)


def loading_bytes(shapes: ModelShapes, setting: Setting, step: Memory) -> int:
    """Return the peak while the base is loaded: base, adapter and process, plus the buffers of loading.

    On CPUs a base in the dtype of its files is memory-mapped, so only a converted base needs the mapped files besides.
    On GPUs files are read into host memory. A quantised base needs one weight in floats at a time on either.
    """
    resident = step.base + step.adapter + step.process
    read_in_shards = setting.rules.splits_base or setting.offloads.streams or setting.tensor > 1
    mapped = setting.stored_bytes if setting.converts and not read_in_shards and not setting.on_gpu else 0
    return resident + mapped + shapes.quantizing_bytes


def saving_bytes(shapes: ModelShapes, setting: Setting, step: Memory) -> int:
    """Return the peak while a checkpoint is written: all but activations, and on CPUs full copies of about 3 A."""
    resident = step.base + step.adapter + step.gradients + step.optimizer + step.messages + step.process
    return resident + (0 if setting.on_gpu else checkpoint_bytes(shapes, setting))


def host_bytes(shapes: ModelShapes, setting: Setting) -> int:
    """Return the host memory of a GPU's process: libraries, plus the larger of loading and training.

    Loading: a machine's processes share the mapped files of an unsharded base; a converted copy is each process's own;
    a quantised base is read one tensor at a time. Training: offloaded state and a checkpoint of about 3 A.
    """
    if not setting.on_gpu:
        return 0
    num_ranks = setting.num_processes
    rules = setting.rules
    in_parts = rules.splits_base or setting.tensor > 1
    shared = 0 if in_parts else setting.stored_bytes // setting.local_processes
    own = base_bytes(shapes) if setting.converts and not in_parts else 0
    if shapes.quantization:
        own = max(tensor.nbytes for tensor in shapes.frozen) + shapes.quantizing_bytes
    state = _optimizer_state(shapes, setting)
    offloaded = state.paged
    if setting.offloads.parameters in ("cpu", "stream"):
        offloaded += shard_bytes(shapes.frozen, rules.base, num_ranks)
    if setting.offloads.optimizer == "cpu":
        offloaded += state.resident + 2 * shard_bytes(shapes.adapter, rules.optimizer, num_ranks)
    training = offloaded + setting.activations_on_host + checkpoint_bytes(shapes, setting)
    return HOST_OF_GPU_PROCESS + max(shared + own, training)


def disk_bytes(shapes: ModelShapes, setting: Setting) -> int:
    """Return the disk space per machine: checkpoints and two more being written, the patch, offloaded state."""
    offloaded = 0
    if setting.offloads.parameters == "nvme":
        offloaded += shard_bytes(shapes.frozen, setting.rules.base, setting.num_processes)
    if setting.offloads.optimizer == "nvme":
        offloaded += 2 * _optimizer_state(shapes, setting).resident
    patch = adapter_bytes(shapes) + shapes.fixed_bytes
    checkpoints = (setting.num_checkpoints + 2) * checkpoint_bytes(shapes, setting)
    return checkpoints + patch + offloaded * setting.local_processes


def _optimizer_state(shapes: ModelShapes, setting: Setting) -> OptimizerStateBytes:
    """Return this rank's optimizer state, offloaded or not."""
    rules = setting.rules
    num_counters = 1 if rules.one_counter else len(shapes.adapter)
    return optimizer_state_bytes(setting.optimizer, shapes, rules.optimizer, setting.num_processes, num_counters)


def _phases(
    shapes: ModelShapes, setting: Setting, training: LiveBytes, evaluation: LiveBytes | None
) -> tuple[tuple[int, int, int], ...]:
    """Return (activations, logits, gathered) of each phase of a micro-batch that may be the peak."""
    gathered = setting.rules.gathered(shapes, setting.num_processes, setting.parallel, on_gpu=setting.on_gpu)
    saved = round(training.saved) - (setting.activations_on_host if setting.on_gpu else 0)
    logits = max(round(training.head), round(evaluation.head) - saved if evaluation else 0)
    return (
        (0, 0, gathered.start),
        (saved + round(training.layer), 0, gathered.layer),
        (saved, logits, gathered.head),
    )
