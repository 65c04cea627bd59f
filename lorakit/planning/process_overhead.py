"""Bytes of a process without its base and adapter: the interpreter, its libraries and their internal buffers.

On CPUs this is measured: a subprocess imports the libraries of a run, takes one step with the built-in base, and prints
its resident memory. That takes seconds, so the user's cache keeps the answer. On GPUs it is a constant.
"""

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import platform
import socket
import subprocess
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from lorakit.errors import TemporaryFailure
from lorakit.files.atomic import digest, write_json
from lorakit.files.cache import cache_folder
from lorakit.launch.kernel_caches import limit_kernel_caches
from lorakit.run.process_memory import rss_bytes
from lorakit.version import VERSION

CUDA_CONTEXT: Final = 500_000_000  # GPU memory of driver, kernels and cuBLAS's workspace
NCCL_BUFFERS: Final = 400_000_000  # GPU memory of the channels between two or more processes
HOST_OF_GPU_PROCESS: Final = 3_000_000_000  # host memory of libraries with their GPU code
TOKENS: Final = 256
OPTIONAL_PACKAGES: Final = ("deepspeed",)
"""Packages that only some backends import."""
PACKAGES: Final = ("torch", "transformers", "tokenizers", "accelerate", "deepspeed", "bitsandbytes", "numpy", "pyarrow")
"""packages whose version changes the measurement"""
VARIABLES: Final = (
    "OMP_",
    "MKL_",
    "KMP_",
    "DNNL_",
    "ONEDNN_",
    "LRU_CACHE_",
    "MALLOC_",
    "LD_",
    "TORCH",
    "PYTORCH",
    "PYTHON",
)
"""beginnings of the names of environment variables that change it"""
QUANTIZATION: Final = "quantization"  # key of bitsandbytes' share in the measurement


def measure_process_bytes(folder: Path, dtype: str, package: str | None, *, quantizes: bool = False) -> int:
    """Return the resident bytes of a process that computes in ``dtype``, without its base and adapter.

    ``folder``: the base, because its tokenizer may be large. ``package``: an optional package that the backend imports.
    ``quantizes``: import bitsandbytes too, as a run with a quantised base or 8-bit moments does.
    """
    measured = _measured_bytes(folder, dtype)
    parts = (package, QUANTIZATION if quantizes else None)
    return measured["plain"] + sum(measured.get(part, 0) for part in parts if part is not None)


@functools.cache
def _measured_bytes(folder: Path, dtype: str) -> dict[str, int]:
    """Return the measurement from the cache, or make it and keep it there."""
    path = cache_folder("process_bytes") / f"{_key(folder, dtype)}.json"
    with contextlib.suppress(OSError, ValueError):  # missing or damaged: measured anew
        cached: dict[str, int] = json.loads(path.read_text())
        if isinstance(cached, dict) and "plain" in cached and all(type(count) is int for count in cached.values()):
            return cached
    measured = _measure_in_subprocess(folder, dtype)
    with contextlib.suppress(OSError, TemporaryFailure):  # a cache that cannot be written costs time only
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, measured)
    return measured


def _key(folder: Path, dtype: str) -> str:
    """Return a digest of what the measurement depends on."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    environment = dict(os.environ)
    limit_kernel_caches(environment)  # as the measured process does
    variables = {name: value for name, value in environment.items() if name.startswith(VARIABLES)}
    computer = [sys.version, sys.executable, platform.platform(), socket.gethostname()]
    parts = [VERSION, computer, versions, variables, _tokenizer_key(folder), dtype]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _tokenizer_key(folder: Path) -> str:
    """Return a digest of the tokenizer, which copies of a base share; the folder's path where it has no such file."""
    path = folder / "tokenizer.json"
    return digest(path) if path.is_file() else str(folder.resolve())


def _measure_in_subprocess(folder: Path, dtype: str) -> dict[str, int]:
    command = [sys.executable, "-m", "lorakit.planning.process_overhead", str(folder), dtype]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    measured: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _take_a_step(folder: Path, dtype: str) -> None:
    """Run forward, backward and update of two packed rows with the built-in base."""
    import pyarrow  # noqa: F401 - a run reads its rows with pyarrow
    import torch

    import_module("lorakit.training.loop")  # by name, because training is above planning in the levels of rooms
    from lorakit.base.find import find_base
    from lorakit.base.load import load_base, load_tokenizer
    from lorakit.data.batch import Batch
    from lorakit.errors import BaseModelError
    from lorakit.files.dtypes import MODEL_DTYPES
    from lorakit.lora import AdapterSpec, attach, find_targets
    from lorakit.lora.inject import adapter_tensors
    from lorakit.objectives.cross_entropy import LossModel, token_scores
    from lorakit.ops.fuse import fuse_model
    from lorakit.parallel.optimizer import build_optimizer

    with contextlib.suppress(BaseModelError):  # a base may be planned from its config alone, without a tokenizer
        tokenizer = load_tokenizer(folder)  # noqa: F841 - resident, as in a run
    model = load_base(find_base("builtin:tiny"), MODEL_DTYPES[dtype], torch.device("cpu"))
    attach(model, find_targets(model, AdapterSpec()), AdapterSpec(), seed=0)
    fuse_model(model)
    optimizer = build_optimizer(adapter_tensors(model), betas=(0.9, 0.999), epsilon=1e-8, weight_decay=0.0)
    positions = torch.arange(TOKENS // 2).repeat(2)[None]
    ids = torch.ones_like(positions)
    token_scores(LossModel(model), Batch(ids, ids, positions, None, (0,), TOKENS, TOKENS)).losses.sum().backward()
    optimizer.step()
    # the matrix library allocates its buffers for larger products only, and never frees them
    _ = torch.ones(TOKENS, 1024, dtype=MODEL_DTYPES[dtype]) @ torch.ones(1024, 1024, dtype=MODEL_DTYPES[dtype])


def _fill_kernel_caches(dtype: str, capacity: int) -> None:
    """Compute products of more shapes than the matrix library stores kernels of, as a run of many steps does."""
    import torch

    from lorakit.files.dtypes import MODEL_DTYPES

    weight = torch.ones(64, 64, dtype=MODEL_DTYPES[dtype])
    for num_rows in range(1, 2 * capacity):
        _ = torch.ones(num_rows, 64, dtype=weight.dtype) @ weight


def _measure(folder: Path, dtype: str) -> dict[str, int]:
    num_kernels = limit_kernel_caches()
    _take_a_step(folder, dtype)
    _fill_kernel_caches(dtype, num_kernels)
    from lorakit.errors import RunError
    from lorakit.quant.bnb import bitsandbytes

    measured = {"plain": rss_bytes()}
    with contextlib.suppress(RunError):  # not installed
        bitsandbytes()
        measured[QUANTIZATION] = rss_bytes() - measured["plain"]
    for package in OPTIONAL_PACKAGES:
        if importlib.util.find_spec(package) is not None:
            before = rss_bytes()
            importlib.import_module(package)
            measured[package] = rss_bytes() - before
    return measured


if __name__ == "__main__":
    print(json.dumps(_measure(Path(sys.argv[1]), sys.argv[2])))
