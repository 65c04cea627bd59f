"""The resources of a machine: GPUs, host memory, cores, disk. Detected, or described by its GPU's name or memory.

GPUs known by name have the memory of the vendors' data sheets, in decimal gigabytes.
"""

import difflib
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import psutil
import torch

from lorakit.errors import LorakitError
from lorakit.launch.workers import usable_cores

GB: Final = 1_000_000_000
CGROUPS: Final = Path("/sys/fs/cgroup")
UNLIMITED: Final = 1 << 60  # a control group without a limit shows a larger number than this
HOST_MEMORY_PER_GPU: Final = 256 * GB  # of a described machine, unless given
BRANDS: Final = re.compile("(nvidia|amd|geforce|tesla|quadro|radeon|instinct|rtx)+")
FORMS: Final = r"sxm\d?|hbm\de?|pcie|oam|generation|blackwell|(maxq)?workstationedition|serveredition"
"""words that drivers append and that do not change the memory"""


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU."""

    name: str
    memory_bytes: int
    has_bfloat16: bool = True
    """Whether it computes in bfloat16; where not, `base.dtype: auto` is float32."""


NAMES_BY_GIGABYTES: Final = {
    256: ["MI325X"],
    192: ["MI300X"],
    186: ["GB200"],
    180: ["B200"],
    144: ["GH200-144"],
    141: ["H200", "H200 NVL"],
    96: ["GH200", "RTX PRO 6000"],
    94: ["H100 NVL"],
    80: ["H100", "H100 PCIe", "A100-80"],
    64: ["MI250X", "MI210"],  # each of the two dies of an MI250X is a device
    48: ["A40", "L40S", "L40", "RTX 6000 Ada", "RTX A6000"],
    40: ["A100-40"],
    32: ["V100-32", "RTX 5000 Ada", "RTX 5090"],
    24: ["A30", "A10", "A10G", "L4", "RTX A5000", "RTX 4090", "RTX 3090 Ti", "RTX 3090"],
    16: ["V100-16", "T4", "RTX 5080", "RTX 5070 Ti", "RTX 4080 SUPER", "RTX 4080", "RTX 4060 Ti-16"],
    12: ["RTX 5070", "RTX 4070 Ti", "RTX 4070", "RTX 3080 Ti", "RTX 3060"],
    11: ["RTX 2080 Ti"],
    10: ["RTX 3080"],
    8: ["RTX 4060 Ti-8", "RTX 4060", "RTX 3070"],
}  # fmt: skip
WITHOUT_BFLOAT16: Final = ("V100-32", "V100-16", "T4", "RTX 2080 Ti")
GPUS: Final = {
    name: Gpu(name, gigabytes * GB, name not in WITHOUT_BFLOAT16)
    for gigabytes, names in NAMES_BY_GIGABYTES.items()
    for name in names
}
OTHER_NAMES: Final = {
    "GH200 480GB": "GH200",  # the driver's name has the CPU's memory
    "GH200 144G HBM3e": "GH200-144",
    "A100": "A100-80", "A100-SXM4-80GB": "A100-80", "A100 80GB PCIe": "A100-80",
    "A100-SXM4-40GB": "A100-40", "A100-PCIE-40GB": "A100-40",
    "V100-SXM2-32GB": "V100-32", "V100-PCIE-32GB": "V100-32",
    "V100": "V100-16", "V100-SXM2-16GB": "V100-16", "V100-PCIE-16GB": "V100-16",
    "RTX PRO 6000 Blackwell": "RTX PRO 6000",
    "RTX 4060 Ti": "RTX 4060 Ti-8",
}  # fmt: skip
"""name that drivers or people use -> name in GPUS"""


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
    gpu: str | None,
    gpus_per_node: int,
    nodes: int,
    host_memory_bytes: int | None,
    gpu_memory_bytes: int | None = None,
) -> Machine:
    """Describe a machine by its GPU's name, its memory, or both. Raises LorakitError: an unknown name."""
    spec = Gpu("GPU", gpu_memory_bytes or 0) if gpu is None else named_gpu(gpu)
    if spec is None:
        names = {_key(known): known for known in GPUS}
        nearest = [names[key] for key in difflib.get_close_matches(_key(str(gpu)), names, n=4, cutoff=0.4)]
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
    return min([int(psutil.virtual_memory().available), *cgroup_rooms(CGROUPS, _own_cgroups())])


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


def named_gpu(name: str) -> Gpu | None:
    """Return the GPU with a name such as `h200` or `NVIDIA H200`; None for an unknown one, as a 4090 for laptops."""
    given = _key(name)
    known = [(_key(other), GPUS[target]) for other, target in {**{name: name for name in GPUS}, **OTHER_NAMES}.items()]
    matches = [(len(key), gpu) for key, gpu in known if _is_form_of(given, key, gpu)]
    return max(matches, key=lambda match: match[0])[1] if matches else None


def _is_form_of(given: str, key: str, gpu: Gpu) -> bool:
    size = f"{gpu.memory_bytes // GB}gb"
    return re.fullmatch(f"{re.escape(key)}(gb)?({size}|{FORMS})*", given) is not None


def _key(name: str) -> str:
    """Return letters and digits in lower case, without brands at the beginning."""
    text = "".join(letter for letter in name.lower() if letter.isalnum())
    brands = BRANDS.match(text)
    return text[brands.end() :] if brands else text
