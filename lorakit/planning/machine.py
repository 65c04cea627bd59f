"""The resources of a machine: GPUs, host memory, cores, disk. Either detected, or described by a GPU's name.

Figures of GPUs are from the vendors' data sheets, in decimal gigabytes and without sparsity.
"""

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from lorakit.base.dtype import measure_all
from lorakit.errors import LorakitError, did_you_mean

GB: Final = 1_000_000_000
CGROUPS: Final = Path("/sys/fs/cgroup")
UNLIMITED: Final = 1 << 60  # a control group without a limit shows a larger number than this


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, with its rates for dense arithmetic."""

    name: str
    memory_bytes: int
    flops: float
    """Operations per second in 16 bits."""
    memory_rate: float
    """Bytes per second of its own memory."""
    link_rate: float
    """Bytes per second to its neighbours in one machine, in one direction."""
    other_names: tuple[str, ...] = ()
    """Other names that drivers and people use."""


def _gpu(name: str, gigabytes: float, teraflops: float, memory: float, link: float, *other_names: str) -> Gpu:
    return Gpu(name, round(gigabytes * GB), teraflops * 1e12, memory * GB, link * GB, other_names)


GPUS: Final = (
    #    name         GB    TFLOP/s  GB/s   GB/s to neighbours
    _gpu("B200",      180,  2250,    8000,  900),
    _gpu("H200",      141,  989,     4800,  450),
    _gpu("H100",      80,   989,     3350,  450),
    _gpu("A100-80",   80,   312,     2039,  300, "A100", "A100-SXM4-80GB", "A100 80GB PCIe"),
    _gpu("A100-40",   40,   312,     1555,  300, "A100-SXM4-40GB", "A100-PCIE-40GB"),
    _gpu("L40S",      48,   362,     864,   32),
    _gpu("L4",        24,   121,     300,   32),
    _gpu("RTX 4090",  24,   165,     1008,  32, "4090"),
    _gpu("RTX 3090",  24,   71,      936,   32, "3090"),
    _gpu("MI300X",    192,  1307,    5300,  448),
)  # fmt: skip
ORDINARY: Final = next(gpu for gpu in GPUS if gpu.name == "RTX 4090")  # rates for a card that is not in the table
NETWORK_RATE: Final = 25e9  # bytes per second and GPU between machines: 200 Gbit/s, usual for such GPUs
HOST_LINK_RATE: Final = 50e9  # bytes per second to and from host memory: PCIe 5 x16 (63 in the standard, 55 measured)
DISK_RATE: Final = 3e9  # bytes per second of one NVMe disk
HOST_MEMORY_PER_GPU: Final = 256 * GB  # of a described machine, unless given


@dataclass(frozen=True)
class Machine:
    """The machines of a run, all equal. If ``gpu`` is None, processors compute and share the host memory."""

    gpu: Gpu | None
    gpus_per_node: int
    nodes: int
    host_memory_bytes: int
    """Per node. Detected: free memory, within the limits of this process's control groups."""
    disk_bytes: int | None
    """Free bytes on each node's disk; None if unknown."""
    described: bool
    """True for a machine given by its GPU's name, False for a detected one."""
    cpu_flops: Mapping[str, float]
    """dtype name -> operations per second of one process on the CPU."""
    cores: int

    def describe(self) -> str:
        """Describe the machine in one line."""
        many = f"{self.nodes} x " if self.nodes > 1 else ""
        host = f"{self.host_memory_bytes / GB:,.0f} GB of host memory{'' if self.described else ' free'}"
        disk = "" if self.disk_bytes is None else f", {self.disk_bytes / GB:,.0f} GB of disk free"
        if self.gpu is None:
            return f"{many}{self.cores} processors, {host}{disk}"
        return f"{many}{self.gpus_per_node} x {self.gpu.name} of {self.gpu.memory_bytes / GB:,.0f} GB, {host}{disk}"


def detect_machine(folder: Path, nodes: int = 1) -> Machine:
    """Detect this machine, with the disk space of ``folder``. All nodes are assumed to be equal."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpu = _detect_gpu() if num_gpus else None
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    return Machine(
        gpu=gpu,
        gpus_per_node=num_gpus,
        nodes=nodes,
        host_memory_bytes=free_host_memory(),
        disk_bytes=shutil.disk_usage(existing).free,
        described=False,
        cpu_flops={} if gpu else {name: rate * 1e9 for name, rate in measure_all(torch.device("cpu")).items()},
        cores=_cores(),
    )


def machine_with_gpu(gpu: str, gpus_per_node: int, nodes: int, host_memory_bytes: int | None) -> Machine:
    """Describe a machine by its GPU. ``host_memory_bytes`` None: the usual memory per GPU.

    Raises:
        LorakitError: the GPU's name is unknown.
    """
    spec = named_gpu(gpu)
    if spec is None:
        names = [gpu.name for gpu in GPUS]
        raise LorakitError(f"--gpu: {gpu!r} is not known.{did_you_mean(gpu, names)} There are {', '.join(names)}")
    memory = HOST_MEMORY_PER_GPU * gpus_per_node if host_memory_bytes is None else host_memory_bytes
    return Machine(spec, gpus_per_node, nodes, memory, disk_bytes=None, described=True, cpu_flops={}, cores=0)


def named_gpu(name: str) -> Gpu | None:
    """Return the GPU with a name such as `h200` or `NVIDIA H200`; None if no known name is part of it."""
    known = [(_alphanumeric(other), gpu) for gpu in GPUS for other in (gpu.name, *gpu.other_names)]
    matches = [(len(text), gpu) for text, gpu in known if text in _alphanumeric(name)]
    return max(matches, key=lambda match: match[0])[1] if matches else None


def free_memory(device: torch.device) -> int:
    """Return the bytes this process can still allocate on a device: a GPU's own memory, else the host's."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_memory()


def free_host_memory() -> int:
    """Return the bytes this process can still allocate: the system's available memory, within its control groups."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if sys.platform == "linux":
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        available = next((int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"), available)
    return min([available, *cgroup_rooms(CGROUPS, _own_cgroups())])


def cgroup_rooms(root: Path, own: Mapping[str, str]) -> list[int]:
    """Return the free bytes of each limited control group above this process.

    ``own``: controller -> group, as in /proc/self/cgroup. Cached pages of files count as free, because the kernel
    drops them when memory is needed.
    """
    rooms = []
    for controller, limit, usage, key in (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        if controller not in own:
            continue
        group = root / controller / own[controller].lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            allowed = _number(folder / limit)
            if allowed is not None and allowed < UNLIMITED:
                rooms.append(max(0, allowed - (_number(folder / usage) or 0) + _stat(folder / "memory.stat", key)))
    return rooms


def _own_cgroups() -> dict[str, str]:
    try:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return {}
    return {controller: path for _, controllers, path in lines for controller in controllers.split(",")}


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _stat(path: Path, key: str) -> int:
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return 0
    return next((int(value) for name, value in words if name == key), 0)


def _detect_gpu() -> Gpu:
    """Return the first GPU of this machine: its actual memory, and the data sheet's rates of the nearest kind."""
    properties = torch.cuda.get_device_properties(0)
    sheet = named_gpu(properties.name) or ORDINARY
    return Gpu(properties.name, properties.total_memory, sheet.flops, sheet.memory_rate, sheet.link_rate)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _alphanumeric(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
