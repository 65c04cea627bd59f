"""What DeepSpeed needs before it starts: itself, its compiled parts, and a disk to offload to."""

import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from lorakit.errors import RunError
from lorakit.parallel.deepspeed_config import STAGES, deepspeed_config
from lorakit.recipe import ParallelSection


def check_prerequisites(parallel: ParallelSection) -> None:
    """Passes when this machine can run the backend. Errors as ``check_deepspeed``, and RecipeError for its keys."""
    if parallel.backend in STAGES:
        deepspeed_config(parallel, parallel.processes)
        check_deepspeed(parallel)


def check_deepspeed(parallel: ParallelSection) -> None:
    """Passes when DeepSpeed can run this recipe here.

    Raises:
        RunError: it is not installed, a compile of its parts was cut off, or nvme offload has no disk or library.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise RunError(
            f"parallel.backend: {parallel.backend} needs DeepSpeed: pip install 'lorakit[deepspeed]', or choose ddp or"
            " fsdp2, which need nothing more"
        )
    for lock in stale_locks(extensions_folder()) if parallel.nvme_path is not None else ():
        raise RunError(
            f"{lock}: a compile was cut off and left this lock, for which every later run would wait for ever;"
            f" remove it: rm {lock}"
        )
    if parallel.nvme_path is not None:
        _check_nvme(Path(parallel.nvme_path))


def extensions_folder() -> Path:
    """Where torch keeps what it compiles for DeepSpeed; the folder need not exist."""
    if "TORCH_EXTENSIONS_DIR" in os.environ:
        return Path(os.environ["TORCH_EXTENSIONS_DIR"])
    from torch.utils.cpp_extension import get_default_build_root

    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    kind = f"cu{torch.version.cuda.replace('.', '')}" if torch.version.cuda else "cpu"
    return Path(get_default_build_root()) / f"{python}_{kind}"


def stale_locks(folder: Path, patience_seconds: float = 3.0) -> list[Path]:
    """Locks of compiles that nobody is working on: still there after a moment, and no process works in their folder."""
    locks = [lock for lock in folder.glob("*/lock") if lock.parent not in set(_working_folders())]
    if not locks:
        return []
    time.sleep(patience_seconds)  # another process may only just have made it
    busy = set(_working_folders())
    return [lock for lock in locks if lock.exists() and lock.parent not in busy]


def disable_shm_comm() -> None:
    """Keep DeepSpeed from compiling its messages through shared memory, which only its inference sends."""
    from deepspeed import ops

    ops.__compatible_ops__["deepspeed_shm_comm"] = False


def announce_compile(parallel: ParallelSection) -> None:
    """A line on standard error when a first use is about to compile, which takes a while."""
    if parallel.nvme_path is not None and not (extensions_folder() / "async_io" / "async_io.so").exists():
        print("compiling DeepSpeed's async_io, once; this takes a few minutes", file=sys.stderr)


def _working_folders() -> Iterator[Path]:
    """The working folders of this machine's processes; a compile works in its own."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            yield (process / "cwd").readlink()
        except OSError:  # it has ended, or is another user's
            continue


def _check_nvme(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise RunError(f"parallel.nvme_path: {folder}: {problem.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise RunError(f"parallel.nvme_path: {folder} cannot be written")
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise RunError(
            "parallel.offload: nvme needs libaio and a C++ compiler (Debian: apt-get install libaio-dev g++);"
            " offload: cpu needs neither"
        )
