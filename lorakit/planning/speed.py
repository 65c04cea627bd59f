"""The expected time of a step: arithmetic, reading weights, and messages that arithmetic does not hide.

For ranking only: the same rough assumptions hold for every backend.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lorakit.planning.axes import AxisTraffic
from lorakit.planning.communication import Traffic
from lorakit.planning.machine import DISK_RATE, HOST_LINK_RATE, NETWORK_RATE, Machine
from lorakit.planning.memory import Setting
from lorakit.planning.model_shapes import ModelShapes
from lorakit.planning.sharding import adapter_bytes, base_bytes
from lorakit.planning.workload import Workload

EFFICIENCY: Final = 0.7  # share of the data sheet's rate that matrix products of a full model reach
FLOAT32_RATE: Final = 1 / 15  # of a GPU's 16-bit rate
CPU_MEMORY_RATE: Final = 20e9  # bytes per second
GLOO_RATE: Final = 1e9  # bytes per second between CPU processes; not hidden, because the computing cores copy them
GPU_LATENCY, CPU_LATENCY = 30e-6, 300e-6  # seconds per message, however small


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: ``computing``, and ``waiting`` for messages and offloaded state."""

    computing: float
    waiting: float

    @property
    def total(self) -> float:
        return self.computing + self.waiting


def step_time(
    shapes: ModelShapes,
    setting: Setting,
    work: Workload,
    machine: Machine,
    dtype: str,
    *,
    checkpointing: bool,
    axes: Mapping[str, AxisTraffic],
) -> StepTime:
    """Estimate the time of one step. axes: what layers wait for, by axis.

    Operations per token: 4 M + 6 w s L + 6 a, and 2 M + 2 w s L more with recomputation. Forward and the gradient of
    the inputs take 2 M each. M: frozen weights in products. w: attention width. s: row length. L: layers. a: trainable
    parameters. Every pass of a micro-batch reads the weights once.
    """
    passes = 3 if checkpointing else 2
    matmul, width = shapes.num_matmul_parameters(), shapes.attention_width * shapes.num_layers
    attention = (8 if checkpointing else 6) * width * min(work.training.width, work.row_tokens)
    trainable = sum(tensor.numel for tensor in shapes.adapter)
    tokens = work.tokens_per_step / setting.num_processes
    flops, memory_rate = _rates(machine, dtype, setting.local_processes)
    arithmetic = tokens * (2 * passes * matmul + attention + 6 * trainable) / flops
    reading = work.micro_batches * passes * base_bytes(shapes) / memory_rate
    computing = arithmetic + reading
    return StepTime(computing, _waiting(shapes, setting, work, machine, computing, axes))


def _rates(machine: Machine, dtype: str, local_processes: int) -> tuple[float, float]:
    """Return (operations, bytes read) per second of one process."""
    if machine.gpu is None:
        flops = machine.cpu_flops.get(dtype) or min(machine.cpu_flops.values())
        return EFFICIENCY * flops / local_processes, CPU_MEMORY_RATE / local_processes
    slower = FLOAT32_RATE if dtype == "float32" else 1.0
    return EFFICIENCY * slower * machine.gpu.flops, machine.gpu.memory_rate


def _waiting(
    shapes: ModelShapes,
    setting: Setting,
    work: Workload,
    machine: Machine,
    computing: float,
    axes: Mapping[str, AxisTraffic],
) -> float:
    """Return the seconds that ``computing`` does not hide.

    On GPUs it hides gathering and offloading. On CPUs it hides only layers streamed from files.
    """
    exchanged = sum(axis.num_bytes for axis in axes.values())
    rule = setting.layout.traffic
    traffic = Traffic(0, 0, 0) if rule is None else rule(shapes, setting.num_processes, work.micro_batches)
    offloaded = _offload_seconds(shapes, setting, work)
    num_messages = traffic.num_messages + sum(axis.num_messages for axis in axes.values())
    if machine.gpu is None:
        if setting.offloads.streams:
            offloaded = max(0.0, offloaded - computing)
        latency = CPU_LATENCY * num_messages
        return (traffic.base_bytes + traffic.adapter_bytes + exchanged) / GLOO_RATE + latency + offloaded
    rate = machine.gpu.link_rate if machine.nodes == 1 else min(machine.gpu.link_rate, NETWORK_RATE)
    gathering = traffic.base_bytes / rate + offloaded
    return max(0.0, gathering - computing) + (traffic.adapter_bytes + exchanged) / rate + GPU_LATENCY * num_messages


def _offload_seconds(shapes: ModelShapes, setting: Setting, work: Workload) -> float:
    """Return the seconds of moving offloaded state: base shards twice a micro-batch, adapter state once a step."""
    disk = DISK_RATE / setting.local_processes
    rates = {"cpu": HOST_LINK_RATE, "nvme": disk, "stream": HOST_LINK_RATE if setting.on_gpu else disk}
    offloads, share = setting.offloads, 1 / setting.num_processes
    seconds = 0.0
    if offloads.parameters != "none":
        seconds += 2 * work.micro_batches * share * base_bytes(shapes) / rates[offloads.parameters]
    if offloads.optimizer != "none":
        seconds += 6 * share * adapter_bytes(shapes) / min(rates[offloads.optimizer], CPU_MEMORY_RATE)
    return seconds
