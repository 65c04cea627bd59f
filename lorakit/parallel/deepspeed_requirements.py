"""Check what DeepSpeed needs on this machine before it starts: the package, its compiled parts, a disk to offload to.

Invariant: a missing requirement is an error here, with its remedy, and never a hang or a traceback later.
"""

import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from lorakit.errors import RunError
from lorakit.parallel._internals import forbid_operation
from lorakit.parallel.deepspeed_config import STAGES, deepspeed_config
from lorakit.recipe import ParallelSection


def check_prerequisites(parallel: ParallelSection) -> None:
    """Return if this machine can run the recipe's backend.

    Raises:
        RunError: as `check_deepspeed`. RecipeError: a key of `parallel.deepspeed` contradicts the recipe.
    """
    if parallel.backend in STAGES:
        deepspeed_config(parallel, parallel.processes)
        check_deepspeed(parallel)


def deepspeed_is_installed() -> bool:
    """True if DeepSpeed can be imported; nothing is imported."""
    return importlib.util.find_spec("deepspeed") is not None


def check_deepspeed(parallel: ParallelSection) -> None:
    """Return if DeepSpeed can run this recipe here.

    Raises:
        RunError: not installed; an interrupted compile left its lock; or nvme offload lacks its folder or libaio.
    """
    if not deepspeed_is_installed():
        raise RunError(
            f"parallel.backend: {parallel.backend} needs DeepSpeed: pip install 'lorakit[deepspeed]', or choose ddp or"
            " fsdp2, which need nothing more"
        )
    # only nvme offload compiles anything, and only a compile waits for such a lock: for ever, in torch's FileBaton
    for lock in stale_locks(extensions_folder()) if parallel.nvme_path is not None else ():
        raise RunError(
            f"{lock}: a compile was cut off and left this lock, for which every later run would wait for ever;"
            f" remove it: rm {lock}"
        )
    if parallel.nvme_path is not None:
        _check_nvme(Path(parallel.nvme_path))


def extensions_folder() -> Path:
    """Return the folder of torch's compiled extensions, DeepSpeed's among them. The folder need not exist."""
    if "TORCH_EXTENSIONS_DIR" in os.environ:
        return Path(os.environ["TORCH_EXTENSIONS_DIR"])
    from torch.utils.cpp_extension import get_default_build_root

    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    kind = f"cu{torch.version.cuda.replace('.', '')}" if torch.version.cuda else "cpu"
    return Path(get_default_build_root()) / f"{python}_{kind}"


def stale_locks(folder: Path, patience_seconds: float = 3.0) -> list[Path]:
    """Return the locks of compiles that no process works on.

    Such a lock still exists after `patience_seconds`, and no process of this machine has its folder as working folder.
    """
    locks = [lock for lock in folder.glob("*/lock") if lock.parent not in set(_working_folders())]
    if not locks:
        return []
    time.sleep(patience_seconds)  # a compile that has just begun may not have changed to its folder yet
    busy = set(_working_folders())
    return [lock for lock in locks if lock.exists() and lock.parent not in busy]


def disable_shm_comm() -> None:
    """Stop DeepSpeed from compiling its collectives through shared memory, which only its inference calls."""
    forbid_operation("deepspeed_shm_comm")


def announce_compile(parallel: ParallelSection) -> None:
    """Print a line to standard error if this run is about to compile, because nothing else would show for minutes."""
    if parallel.nvme_path is not None and not (extensions_folder() / "async_io" / "async_io.so").exists():
        print("compiling DeepSpeed's async_io, once; this takes a few minutes", file=sys.stderr)


def _working_folders() -> Iterator[Path]:
    """Yield the working folders of this machine's processes. ninja compiles an extension from inside its folder."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            yield (process / "cwd").readlink()
        except OSError:  # the process has ended, or belongs to another user
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
