"""About how long a step takes: arithmetic, reading weights, and what is not hidden of the messages.

For ranking, not for promises: the same assumptions hold for every backend.
"""

from dataclasses import dataclass
from typing import Final

from lorakit.planning.communication import Traffic
from lorakit.planning.machine import DISK_RATE, HOST_LINK_RATE, NETWORK_RATE, Machine
from lorakit.planning.memory import Setting
from lorakit.planning.model_shapes import ModelShapes
from lorakit.planning.sharding import adapter_bytes, base_bytes
from lorakit.planning.workload import Workload

EFFICIENCY: Final = 0.7  # of the data sheet's rate in matrix products of a whole model
FLOAT32_RATE: Final = 1 / 15  # of a GPU's 16-bit rate
CPU_MEMORY_RATE: Final = 20e9
GLOO_RATE: Final = 1e9  # between processes on CPUs, through sockets; it is done by the cores that compute
GPU_LATENCY, CPU_LATENCY = 30e-6, 300e-6  # seconds of a message, however small


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: ``computing``, and ``waiting`` for messages and offloaded state."""

    computing: float
    waiting: float

    @property
    def total(self) -> float:
        return self.computing + self.waiting


def duration(
    shapes: ModelShapes, setting: Setting, work: Workload, machine: Machine, dtype: str, *, checkpointing: bool
) -> StepTime:
    """Of one step.

    Arithmetic per token: 4 M + 6 w s L + 6 a (forward 2 M, gradient of the inputs 2 M; M weights in products, w
    attention's width, s the row's length, L layers, a the adapter's parameters), and 2 M + 2 w s L once more when
    layers are recomputed. Every pass of a micro-batch reads the weights once.
    """
    passes = 3 if checkpointing else 2
    matmul, width = shapes.num_matmul_parameters(), shapes.attention_width * shapes.num_layers
    attention = (8 if checkpointing else 6) * width * min(work.training.width, work.row_tokens)
    trained = sum(piece.numel for piece in shapes.adapter)
    tokens = work.tokens_per_step / setting.num_processes
    flops, memory_rate = _rates(machine, dtype, setting.local_processes)
    arithmetic = tokens * (2 * passes * matmul + attention + 6 * trained) / flops
    reading = work.micro_batches * passes * base_bytes(shapes) / memory_rate
    traffic = setting.layout.traffic(shapes, setting.num_processes, work.micro_batches)
    return StepTime(arithmetic + reading, _waiting(shapes, setting, work, machine, traffic, arithmetic + reading))


def _rates(machine: Machine, dtype: str, local_processes: int) -> tuple[float, float]:
    """(operations, bytes read) per second of one process."""
    if machine.gpu is None:
        flops = machine.cpu_flops.get(dtype) or min(machine.cpu_flops.values())
        return EFFICIENCY * flops / local_processes, CPU_MEMORY_RATE / local_processes
    slower = FLOAT32_RATE if dtype == "float32" else 1.0
    return EFFICIENCY * slower * machine.gpu.flops, machine.gpu.memory_rate


def _waiting(
    shapes: ModelShapes, setting: Setting, work: Workload, machine: Machine, traffic: Traffic, computing: float
) -> float:
    """On GPUs what is gathered ahead hides behind arithmetic; on CPUs only what is streamed from files does."""
    offloaded = _offloaded(shapes, setting, work)
    if machine.gpu is None:
        if setting.offloads.streams:
            offloaded = max(0.0, offloaded - computing)
        latency = CPU_LATENCY * traffic.num_messages
        return (traffic.base_bytes + traffic.adapter_bytes) / GLOO_RATE + latency + offloaded
    rate = machine.gpu.link_rate if machine.nodes == 1 else min(machine.gpu.link_rate, NETWORK_RATE)
    gathering = traffic.base_bytes / rate + offloaded
    return max(0.0, gathering - computing) + traffic.adapter_bytes / rate + GPU_LATENCY * traffic.num_messages


def _offloaded(shapes: ModelShapes, setting: Setting, work: Workload) -> float:
    """Seconds in which what rests elsewhere comes and goes: parts of the base twice a micro-batch, A once a step."""
    disk = DISK_RATE / setting.local_processes
    rates = {"cpu": HOST_LINK_RATE, "nvme": disk, "stream": HOST_LINK_RATE if setting.on_gpu else disk}
    places, share = setting.offloads, 1 / setting.num_processes
    seconds = 0.0
    if places.parameters != "none":
        seconds += 2 * work.micro_batches * share * base_bytes(shapes) / rates[places.parameters]
    if places.optimizer != "none":
        seconds += 6 * share * adapter_bytes(shapes) / min(rates[places.optimizer], CPU_MEMORY_RATE)
    return seconds
