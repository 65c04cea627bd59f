"""Report devices, dtypes and packages of this machine, and the broken parts, which never end the report."""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
from contextlib import suppress
from pathlib import Path

import torch

from lorakit.backends import BACKENDS
from lorakit.base.device import UNTESTED, choose_dtype, find_gpus, product_rates
from lorakit.base.find import BUILTIN, find_base
from lorakit.files.atomic import user_cache
from lorakit.files.base_files import open_base_files
from lorakit.files.text import Say, count_of, say_lines, size
from lorakit.launch.libraries import quiet_libraries
from lorakit.run.trackers import describe_error
from lorakit.version import versions

EXTRAS = {
    "deepspeed": "[deepspeed]", "bitsandbytes": "[quant]", "tensorboard": "[log]", "wandb": "[log]", "mlflow": "[log]",
    "trackio": "[log]", "starlette": "[serve]", "uvicorn": "[serve]", "llguidance": "[structured]",
}  # fmt: skip


def doctor(say: Say = print) -> bool:
    """Print devices, dtypes, backends, compilers and packages; True if nothing is broken."""
    broken: list[str] = []
    say("versions   " + ", ".join(f"{name} {number}" for name, number in versions().items()))
    threads = count_of(torch.get_num_threads(), "thread")
    say(f"system     {platform.platform()}, {os.cpu_count()} processors, torch uses {threads}")
    for device in [torch.device("cpu"), *find_gpus()]:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        rates = ", ".join(f"{key} {rate:,.0f} GFLOP/s" for key, rate in product_rates(device).items())
        untested = "; untested: no test of lorakit has run on one" if device.type in UNTESTED else ""
        say(f"device     {device} ({name}): {rates}; dtype auto is {choose_dtype('auto', device).name}{untested}")
    backends = {name: facts.package for name, facts in BACKENDS.items() if facts.is_distributed}
    missing = [name for name, package in backends.items() if package is not None and not _version(package)]
    rest = f"; not installed: {', '.join(missing)} (pip install 'lorakit[deepspeed]')" if missing else ""
    say(f"backends   {', '.join(name for name in backends if name not in missing)}{rest}")
    tools = [f"{tool} {'found' if shutil.which(tool) else 'not found'}" for tool in ("g++", "ninja", "nvcc")]
    say(f"compilers  {', '.join(tools)}")
    for package, extra in EXTRAS.items():
        number = _version(package)
        say(f"optional   {package} {number or f'not installed (extra {extra})'}")
        if number is None:
            continue
        try:
            with quiet_libraries():
                importlib.import_module(package)
        except Exception as problem:  # a broken package fails in many ways
            why = describe_error(problem)
            broken.append(f"{package} {number} cannot be imported: {why}. pip install -U 'lorakit{extra}'")
    for base in BUILTIN:
        try:
            open_base_files(find_base(base))
            say(f"base       {base} is complete")
        except Exception as problem:  # any problem of a base is reported, because the other checks still count
            broken.append(f"{base}: {problem}")
    for name, folder in (("cache", user_cache()), ("here", Path.cwd())):
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        say(f"disk       {name} {folder}: {size(shutil.disk_usage(existing).free)} free")
        if not os.access(existing, os.W_OK):
            broken.append(f"{folder} cannot be written")
    say_lines(say, [f"BROKEN     {line}" for line in broken] or ["nothing is broken"])
    return not broken


def _version(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:  # metadata alone may be the rest of a removed package
        return None
    for name in (package, f"{package}-skinny"):  # mlflow's client is mlflow-skinny
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "of unknown version"
