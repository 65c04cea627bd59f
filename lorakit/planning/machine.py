"""The resources of a machine: GPUs, host memory, cores, disk. Detected, or described by its GPU's name or memory."""

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from lorakit.errors import LorakitError
from lorakit.launch.workers import usable_cores
from lorakit.planning.gpus import GB, Gpu, named_gpu, nearest_names

CGROUPS: Final = Path("/sys/fs/cgroup")
UNLIMITED: Final = 1 << 60  # a control group without a limit shows a larger number than this
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
        cores=usable_cores(),
    )


def machine_with_gpu(
    gpu: str | None,
    gpus_per_node: int,
    nodes: int,
    host_memory_bytes: int | None,
    gpu_memory_bytes: int | None = None,
) -> Machine:
    """Describe a machine by its GPU. ``host_memory_bytes`` None: the usual memory per GPU.

    gpu: a name; None: a GPU of ``gpu_memory_bytes`` with bfloat16. ``gpu_memory_bytes`` None: the memory of the named
    GPU.

    Raises:
        LorakitError: the GPU's name is unknown.
    """
    spec = Gpu("GPU", gpu_memory_bytes or 0) if gpu is None else named_gpu(gpu)
    if spec is None:
        nearest = nearest_names(str(gpu))
        listed = f" Nearest: {', '.join(nearest)}." if nearest else ""
        raise LorakitError(f"--gpu: {gpu!r} is not known.{listed} For another GPU, give its memory: --gpu-memory-gb N")
    if gpu_memory_bytes is not None:
        spec = replace(spec, memory_bytes=gpu_memory_bytes)
    memory = HOST_MEMORY_PER_GPU * gpus_per_node if host_memory_bytes is None else host_memory_bytes
    return Machine(spec, gpus_per_node, nodes, memory, disk_bytes=None, described=True, cores=0)


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
    """Return the first GPU of this machine, with its actual memory."""
    properties = torch.cuda.get_device_properties(0)
    return Gpu(properties.name, properties.total_memory)
