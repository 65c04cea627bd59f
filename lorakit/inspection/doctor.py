"""What this machine can do, and what of it is broken."""

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from lorakit.base.dtype import choose_dtype, measure_all
from lorakit.base.load import BUILTIN, find_base
from lorakit.parallel import BACKENDS
from lorakit.patch import open_base_files
from lorakit.run.record import versions

OPTIONAL = {
    "deepspeed": "[deepspeed]", "bitsandbytes": "[quant]", "tensorboard": "[log]", "wandb": "[log]", "mlflow": "[log]",
    "trackio": "[log]",
}  # fmt: skip


def doctor(say: Callable[[str], None] = print) -> bool:
    """Print devices, dtypes, engines, compilers and packages; True when nothing is broken."""
    broken: list[str] = []
    say("versions   " + ", ".join(f"{name} {number}" for name, number in versions().items()))
    say(f"system     {platform.platform()}, {os.cpu_count()} processors, torch uses {torch.get_num_threads()} threads")
    devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]
    for device in devices:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        rates = ", ".join(f"{key} {rate:,.0f} GFLOP/s" for key, rate in measure_all(device).items())
        say(f"device     {device} ({name}): {rates}; dtype auto is {choose_dtype('auto', device).name}")
    say(f"backends   {', '.join(BACKENDS)}")
    say(
        "compilers  "
        + ", ".join(f"{tool} {'found' if shutil.which(tool) else 'not found'}" for tool in ("g++", "ninja", "nvcc"))
    )
    for package, extra in OPTIONAL.items():
        say(f"optional   {package} {_version(package) or f'not installed (extra {extra})'}")
    for base in BUILTIN:
        try:
            open_base_files(find_base(base))
            say(f"base       {base} is whole")
        except Exception as problem:  # a doctor reports what it finds, whatever it is
            broken.append(f"{base}: {problem}")
    broken += _check_places(say)
    for line in broken:
        say(f"BROKEN     {line}")
    if not broken:
        say("nothing is broken")
    return not broken


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_places(say: Callable[[str], None]) -> list[str]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    broken = []
    for name, place in (("cache", cache), ("here", Path.cwd())):
        existing = next(parent for parent in (place, *place.parents) if parent.exists())
        free = shutil.disk_usage(existing).free
        say(f"disk       {name} {place}: {free / 1e9:.1f} GB free")
        if not os.access(existing, os.W_OK):
            broken.append(f"{place} cannot be written")
    return broken
