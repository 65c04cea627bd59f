"""The resources of a machine: GPUs, host memory, cores, disk. Detected, or described by its GPU's name or memory."""

import re
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import psutil
import torch

from lorakit.errors import LorakitError, did_you_mean
from lorakit.launch.workers import usable_cores

GB: Final = 1_000_000_000
CGROUPS: Final = Path("/sys/fs/cgroup")
FORMS: Final = re.compile(r"\b(sxm\d?|pcie|oam|hbm\de?|generation|blackwell|max-q|workstation|server|edition)\b")
"""words that drivers append and that do not change the memory"""
HOST_MEMORY_PER_GPU: Final = 256 * GB  # of a described machine, unless given


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU."""

    name: str
    memory_bytes: int
    has_bfloat16: bool = True  # Whether it computes in bfloat16; where not, `base.dtype: auto` is float32.


def named_gpu(name: str) -> Gpu | None:
    """Return the GPU with a name such as `h200` or `NVIDIA H200`; None for an unknown one, as a 4090 for laptops."""
    return _KNOWN.get(_key(name))


def _key(name: str) -> str:
    """Return letters and digits in lower case, without brands at the beginning and forms of the same memory."""
    text = "".join(letter for letter in FORMS.sub("", name.lower()) if letter.isalnum())
    return re.sub("^(nvidia|amd|geforce|tesla|quadro|radeon|instinct|rtx)+", "", text).removesuffix("gb")


_FACTS: Final = tomllib.loads((Path(__file__).parents[1] / "assets" / "gpus.toml").read_text(encoding="utf-8"))
GPUS: Final = {
    name: Gpu(name, int(gigabytes) * GB, name not in _FACTS["without_bfloat16"])
    for gigabytes, names in _FACTS["by_gigabytes"].items()
    for name in names
}
OTHER_NAMES: Final[dict[str, str]] = _FACTS["other_names"]  # name that drivers or people use -> name in GPUS
_KNOWN: Final = {
    **{_key(f"{name} {gpu.memory_bytes // GB}"): gpu for name, gpu in GPUS.items()},
    **{_key(name): gpu for name, gpu in GPUS.items()},
    **{_key(other): GPUS[name] for other, name in OTHER_NAMES.items()},
}
"""name without brand -> GPU; also with the memory behind the name"""


@dataclass(frozen=True)
class Machine:
    """The machines of a run, all equal. If ``gpu`` is None, processors compute and share the host memory."""

    gpu: Gpu | None
    gpus_per_node: int
    nodes: int
    host_memory_bytes: int  # Per node. Detected: free memory, within the limits of this process's control groups.
    disk_bytes: int | None  # Free bytes on each node's disk; None if unknown.
    described: bool  # True for a machine given by its GPU's name, False for a detected one.
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
    properties = torch.cuda.get_device_properties(0) if num_gpus else None
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    return Machine(
        gpu=None if properties is None else Gpu(properties.name, properties.total_memory),
        gpus_per_node=num_gpus,
        nodes=nodes,
        host_memory_bytes=free_host_memory(),
        disk_bytes=shutil.disk_usage(existing).free,
        described=False,
        cores=usable_cores(),
    )


def machine_with_gpu(
    gpu: str | None, gpus_per_node: int, nodes: int, host_memory_bytes: int | None, gpu_memory_bytes: int | None = None
) -> Machine:
    """Describe a machine by its GPU's name, its memory, or both. Raises LorakitError: an unknown name."""
    spec = Gpu("GPU", gpu_memory_bytes or 0) if gpu is None else named_gpu(gpu)
    if spec is None:
        nearest = did_you_mean(str(gpu).upper(), GPUS)
        raise LorakitError(f"--gpu: {gpu!r} is not known.{nearest} For another GPU, give its memory: --gpu-memory-gb N")
    if gpu_memory_bytes is not None:
        spec = replace(spec, memory_bytes=gpu_memory_bytes)
    memory = HOST_MEMORY_PER_GPU * gpus_per_node if host_memory_bytes is None else host_memory_bytes
    return Machine(spec, gpus_per_node, nodes, memory, disk_bytes=None, described=True, cores=0)


def free_memory(device: torch.device) -> int:
    """Return the bytes this process can still allocate on a device: a GPU's own memory, else the host's."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_memory()


def free_host_memory() -> int:
    """Return the bytes this process can still allocate: the system's available memory, within its control groups."""
    lines = [line.split(":", 2) for line in _read(Path("/proc/self/cgroup")).splitlines()]
    own = {controller: path for _, controllers, path in lines for controller in controllers.split(",")}
    return min([int(psutil.virtual_memory().available), *cgroup_rooms(CGROUPS, own)])


def cgroup_rooms(root: Path, own: Mapping[str, str]) -> list[int]:
    """Return the free bytes of each limited control group above this process; cached pages of files count as free."""
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
            allowed = _read(folder / limit).strip()
            if allowed.isdecimal():  # without a limit "max", or a number larger than any memory
                cached = re.search(rf"^{key} (\d+)", _read(folder / "memory.stat"), re.MULTILINE)
                rooms.append(max(0, int(allowed) - int(_read(folder / usage) or 0) + int(cached[1] if cached else 0)))
    return rooms


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
