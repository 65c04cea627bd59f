"""Bytes of one process by category, from the record of its backend, the shapes of its tensors and its activations.

Every figure is rank 0's, because rank 0 has the largest shards. Two inputs are measured instead of computed: the
activations of a micro-batch (activations.py), and the constants of a process without its base, below.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from lorakit.backends import Backend, Sizes
from lorakit.planning.activations import LiveBytes
from lorakit.planning.skeleton import EMBEDDING, ROOT, ModelShapes
from lorakit.quant.bnb import OPTIMIZERS as BNB_OPTIMIZERS
from lorakit.recipe import Recipe
from lorakit.recipe.parallel import OffloadSection

MEGABYTE: Final = 1_000_000
CPU_PROCESS: Final = {"float32": 450_000_000, "bfloat16": 520_000_000, "float16": 520_000_000}
"""dtype -> bytes of interpreter, torch, transformers and lorakit after a step, with the kernels that oneDNN compiles in
16 bits; from `python -m benchmarks.plan --process`"""
PACKAGE_BYTES: Final = {"deepspeed": 11_000_000, "bitsandbytes": 31_000_000}
"""package -> bytes that it adds to a CPU process; measured in the same way"""
CUDA_CONTEXT: Final = 500_000_000  # GPU memory of driver, kernels and cuBLAS's workspace; an estimate, not measured
NCCL_BUFFERS: Final = 400_000_000  # GPU memory of the channels between two or more processes; not measured
HOST_OF_GPU_PROCESS: Final = 3_000_000_000  # host memory of libraries with their GPU code; not measured
MARGIN: Final = 0.25  # Free share required above the predicted peak before a candidate counts as fitting.
HEAP_LAYERS: Final = 5
"""Layers whose saved activations equal the freed blocks that glibc 2.36 does not return; from benchmarks/plan.py."""

PAGED_FROM: Final = 100_000  # elements: the moments of a smaller tensor are not paged
STATE_SHARES: Final = {"adamw": 2.0, "adamw8bit": 0.51, "lion": 1.0, "muon": 1.0, "sgd": 1.0, "adafactor": 0.0}
"""optimizer -> bytes of its state for each byte of the float32 adapter. 8 bits: of two moments, with their scales;
adafactor: means over rows and columns, which are few"""


@dataclass(frozen=True)
class Memory:
    """Peak bytes of one process on its computing device, by category; ``host`` and ``disk`` are counted apart."""

    base: int
    adapter: int
    gradients: int
    optimizer: int
    activations: int
    """Saved for backward, plus the temporaries of the layer being computed, plus the freed blocks of the C heap."""
    logits: int  # Output head and loss, if the step's peak is there.
    buffers: int  # Messages, flat copies, and sharded tensors while they are gathered.
    process: int
    loading: int  # Peak of the process while the base is loaded.
    saving: int  # Peak of the process while a checkpoint is written.
    host: int = 0  # On GPUs: host memory of the process.
    disk: int = 0  # Per machine: checkpoints and patch.

    @property
    def training(self) -> int:
        """Peak of a training step."""
        return sum(getattr(self, name) for name in CATEGORIES)

    @property
    def peak(self) -> int:
        return max(self.training, self.loading, self.saving)


CATEGORIES: Final = {
    "base": "base", "adapter": "adapter", "gradients": "grads", "optimizer": "optim", "activations": "activ",
    "logits": "logits", "buffers": "buffers", "process": "process",
}  # fmt: skip
"""category, of which a training step's memory is the sum -> head of its column in the plan's text"""


@dataclass(frozen=True)
class Setting:
    """Everything besides tensor shapes that decides memory: processes and the recipe's keys, its backend too."""

    recipe: Recipe
    num_processes: int  # Processes with the same part of each weight.
    local_processes: int  # Processes on one machine.
    on_gpu: bool
    dtype: str
    converts: bool  # Whether the files store another dtype than the run's.
    stored_bytes: int  # Bytes of memory-mapped base files; 0 for a quantised base, which is read tensor by tensor.
    layer_bytes: int  # Bytes that one layer saves for backward without recomputation.
    tensor: int  # Processes that share each weight.
    activations_on_host: int  # Bytes of layer inputs in host memory until backward (train.activation_offload).

    @property
    def facts(self) -> Backend:
        return self.recipe.parallel.facts

    @property
    def offloads(self) -> OffloadSection:
        """The part of the recipe's offloading that the backend can do."""
        offloads = self.recipe.parallel.offloads
        optimizer = offloads.optimizer if offloads.optimizer in self.facts.optimizer_memory else "none"
        parameters = offloads.parameters if offloads.parameters in self.facts.base_memory else "none"
        if self.facts.offloads_together and optimizer != parameters:
            return OffloadSection(optimizer="cpu", parameters="cpu")
        return OffloadSection(optimizer=optimizer, parameters=parameters)

    @property
    def state_share(self) -> float:
        """Bytes of optimizer state, resident and paged, for each byte of the adapter."""
        return STATE_SHARES[self.recipe.train.optimizer.removeprefix("paged_")]

    @property
    def reads_parts(self) -> bool:
        """True if a process reads only a part of the base from its files."""
        return self.facts.shards_base or self.tensor > 1

    def shard_bytes(self, tensors: Iterable[Tensor], *, sharded: bool = True) -> int:
        """Return the bytes of a rank's shards of tensors, or of the full tensors if they are not sharded."""
        num_ranks = self.num_processes if sharded else 1
        return sum(self.facts.shard_numel(tensor, num_ranks) * tensor.itemsize for tensor in tensors)


def memory_of(shapes: ModelShapes, setting: Setting, training: LiveBytes, evaluation: LiveBytes) -> Memory:
    """Return the memory of one process at the peak of a step, and while it loads and saves."""
    facts = setting.facts
    offloads = setting.offloads
    has_optimizer = offloads.optimizer == "none" or not setting.on_gpu
    has_adapter = offloads.parameters == "none" or not (setting.on_gpu and facts.shards_adapter)
    base = resident_base_bytes(shapes, setting)
    adapter = setting.shard_bytes(shapes.adapter, sharded=facts.shards_adapter) if has_adapter else 0
    gradients = setting.shard_bytes(shapes.adapter, sharded=facts.shards_gradients) if has_optimizer else 0
    optimizer = _optimizer_state(shapes, setting)[0] if has_optimizer else 0
    process = process_bytes(shapes, setting)
    buffers = facts.buffers(_sizes(shapes, setting))
    saved = round(training.saved) - (setting.activations_on_host if setting.on_gpu else 0)
    head = max(round(training.head), round(evaluation.head) - saved)
    # before the first layer, in a layer, in the head: the largest is the peak
    phases = ((0, 0, buffers.start), (saved + round(training.layer), 0, buffers.layer), (saved, head, buffers.head))
    activations, logits, gathered = max(phases, key=sum)
    checkpoint = checkpoint_bytes(shapes, setting)
    copies = 0 if setting.on_gpu else checkpoint  # it is written from full copies on the CPU
    num_checkpoints = setting.recipe.train.keep_checkpoints + 2  # two more while they are written
    return Memory(
        base=base,
        adapter=adapter,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations + heap_bytes(shapes, setting),
        logits=logits,
        buffers=buffers.resident + gathered,
        process=process,
        loading=base + adapter + process + loading_bytes(shapes, setting),
        saving=base + adapter + gradients + optimizer + buffers.resident + process + copies,
        host=host_bytes(shapes, setting),
        disk=num_checkpoints * checkpoint + shapes.adapter_bytes + shapes.fixed_bytes,
    )


def resident_base_bytes(shapes: ModelShapes, setting: Setting) -> int:
    """Return the bytes of the base on the device; with ``stream`` twice the largest layer, and all outside."""
    if setting.offloads.streams:
        groups = shapes.bytes_of_groups(shapes.base)
        layers = [size for group, size in groups.items() if group not in (ROOT, EMBEDDING)]
        return shapes.base_bytes - sum(layers) + 2 * max(layers)
    if setting.offloads.parameters != "none" and setting.on_gpu:
        return 0
    return setting.shard_bytes(shapes.frozen, sharded=setting.facts.shards_base)


def checkpoint_bytes(shapes: ModelShapes, setting: Setting) -> int:
    """Return the bytes of a checkpoint: adapter, fixed tensors, unsharded optimizer state."""
    return round((1 + setting.state_share) * shapes.adapter_bytes) + shapes.fixed_bytes


def heap_bytes(shapes: ModelShapes, setting: Setting) -> int:
    """Return the freed blocks of the C heap that are neither reused nor returned: activations of HEAP_LAYERS layers.

    0 with a sharded or quantised base, with which lorakit makes the C library return freed blocks at once.
    """
    if setting.on_gpu or setting.facts.shards_base or shapes.quantization:
        return 0
    return HEAP_LAYERS * setting.layer_bytes


def process_bytes(shapes: ModelShapes, setting: Setting) -> int:
    """Return the bytes of a process without its base: of its libraries, and on GPUs of context and channels."""
    if setting.on_gpu:
        return CUDA_CONTEXT + (NCCL_BUFFERS if setting.num_processes * setting.tensor > 1 else 0)
    quantizes = bool(shapes.quantization) or setting.recipe.train.optimizer in BNB_OPTIMIZERS
    packages = (setting.facts.package, "bitsandbytes" if quantizes else None)
    return CPU_PROCESS[setting.dtype] + sum(PACKAGE_BYTES[package] for package in packages if package is not None)


def loading_bytes(shapes: ModelShapes, setting: Setting) -> int:
    """Return the bytes needed while the base is loaded, besides base, adapter and process.

    On CPUs a base in the dtype of its files is memory-mapped, so only a converted base needs the mapped files besides.
    On GPUs files are read into host memory. A quantised base needs one weight in floats at a time on either.
    """
    is_mapped = setting.converts and not setting.on_gpu and not (setting.reads_parts or setting.offloads.streams)
    return (setting.stored_bytes if is_mapped else 0) + shapes.quantizing_bytes


def host_bytes(shapes: ModelShapes, setting: Setting) -> int:
    """Return the host memory of a GPU's process: libraries, plus the larger of loading and training.

    Loading: a machine's processes share the mapped files of an unsharded base; a converted copy is each process's own;
    a quantised base is read one tensor at a time. Training: offloaded state and a checkpoint.
    """
    if not setting.on_gpu:
        return 0
    facts = setting.facts
    shared = 0 if setting.reads_parts else setting.stored_bytes // setting.local_processes
    own = shapes.base_bytes if setting.converts and not setting.reads_parts else 0
    if shapes.quantization:
        own = max(tensor.nbytes for tensor in shapes.frozen) + shapes.quantizing_bytes
    resident, offloaded = _optimizer_state(shapes, setting)
    if setting.offloads.parameters in ("cpu", "stream"):
        offloaded += setting.shard_bytes(shapes.frozen, sharded=facts.shards_base)
    if setting.offloads.optimizer == "cpu":  # with the masters and their gradients
        offloaded += resident + 2 * setting.shard_bytes(shapes.adapter, sharded=facts.shards_optimizer)
    training = offloaded + setting.activations_on_host + checkpoint_bytes(shapes, setting)
    return HOST_OF_GPU_PROCESS + max(shared + own, training)


def _sizes(shapes: ModelShapes, setting: Setting) -> Sizes:
    """Return the sizes that decide the backend's buffers."""
    groups = shapes.bytes_of_groups(shapes.tensors.values())
    root = groups.pop(ROOT, 0)
    embedding = groups.pop(EMBEDDING, 0)
    parallel = setting.recipe.parallel
    return Sizes(
        num_ranks=setting.num_processes,
        on_gpu=setting.on_gpu,
        base=shapes.base_bytes,
        adapter=shapes.adapter_bytes,
        value=shapes.base_bytes / sum(tensor.numel() for tensor in shapes.frozen),
        largest=max(tensor.nbytes for tensor in shapes.frozen),
        root=root,
        embedding=embedding,
        layers=sum(groups.values()),
        layer=max(groups.values(), default=0),
        bucket=round(parallel.bucket_mb * MEGABYTE),
        prefetch=round(parallel.prefetch_mb * MEGABYTE),
        reshard_after_forward=parallel.reshard_after_forward,
    )


def _optimizer_state(shapes: ModelShapes, setting: Setting) -> tuple[int, int]:
    """Return the resident and the paged bytes of this rank's optimizer state, offloaded or not."""
    total = setting.state_share * setting.shard_bytes(shapes.adapter, sharded=setting.facts.shards_optimizer)
    paged = 0.0
    if setting.recipe.train.optimizer.startswith("paged"):  # which only backends that shard nothing can run
        paged = setting.state_share * sum(tensor.nbytes for tensor in shapes.adapter if tensor.numel() >= PAGED_FROM)
    return round(total - paged), round(paged)
