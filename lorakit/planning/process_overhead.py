"""What a process takes before it holds anything of a run: its libraries, and what they keep once they are in use.

On CPUs that is measured: another process imports what a run imports, takes one step with the built-in base, and says
how much of the memory it then holds is not the base's. On GPUs it is a stated constant.
"""

import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Final

from lorakit.run.process_memory import rss_bytes

CUDA_CONTEXT: Final = 500_000_000  # driver, kernels and cuBLAS's workspace, in the GPU's memory
NCCL_BUFFERS: Final = 400_000_000  # channels to the neighbours, once there are any
HOST_OF_GPU_PROCESS: Final = 3_000_000_000  # libraries with their GPU code, in host memory
TOKENS: Final = 256
OPTIONAL: Final = ("deepspeed",)
"""What some backends import besides."""
PACKED: Final = "packed"


def measure_process_bytes(folder: Path, dtype: str, needs: str | None, *, packs: bool = False) -> int:
    """Resident bytes of a process that has everything but a base.

    ``folder`` holds the base, whose tokenizer may be large; it computes in ``dtype``; ``needs`` is a package that the
    backend imports besides; ``packs``: weights or moments are packed.
    """
    found = _measure_in_subprocess(folder, dtype)
    return found["plain"] + sum(found.get(name, 0) for name in (needs, PACKED if packs else None) if name is not None)


@functools.cache
def _measure_in_subprocess(folder: Path, dtype: str) -> dict[str, int]:
    command = [sys.executable, "-m", "lorakit.planning.process_overhead", str(folder), dtype]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def _take_a_step(folder: Path, dtype: str) -> None:
    """Two rows end to end, forward, backward and update, with the built-in base."""
    import pyarrow  # noqa: F401 - rows are read by it
    import torch

    import_module("lorakit.training.loop")  # what a run imports; by name, because training stands above planning
    from lorakit.base.dtype import DTYPES
    from lorakit.base.load import find_base, load_base, load_tokenizer
    from lorakit.data.batch import Batch
    from lorakit.errors import BaseModelError
    from lorakit.lora import AdapterSpec, attach, find_targets
    from lorakit.lora.inject import adapter_tensors
    from lorakit.objectives.cross_entropy import LossModel, loss_sum
    from lorakit.parallel.optimizer import build_optimizer

    with contextlib.suppress(BaseModelError):  # a base that is only described may have no tokenizer
        tokenizer = load_tokenizer(folder)  # noqa: F841 - it is held, as in a run
    model = load_base(find_base("builtin:tiny"), DTYPES[dtype], torch.device("cpu"))
    attach(model, find_targets(model, AdapterSpec()), AdapterSpec(), seed=0)
    optimizer = build_optimizer(adapter_tensors(model), betas=(0.9, 0.999), epsilon=1e-8, weight_decay=0.0)
    positions = torch.arange(TOKENS // 2).repeat(2)[None]
    ids = torch.ones_like(positions)
    loss_sum(LossModel(model), Batch(ids, ids, positions, None, (0,), TOKENS, TOKENS)).backward()
    optimizer.step()
    _ = torch.ones(TOKENS, 1024, dtype=DTYPES[dtype]) @ torch.ones(
        1024, 1024, dtype=DTYPES[dtype]
    )  # what the matrix library keeps for larger products


def _report(folder: Path, dtype: str) -> dict[str, int]:
    _take_a_step(folder, dtype)
    from lorakit.errors import RunError
    from lorakit.quant.bnb import bitsandbytes

    found = {"plain": rss_bytes()}
    with contextlib.suppress(RunError):  # not installed
        bitsandbytes()
        found[PACKED] = rss_bytes() - found["plain"]
    for package in OPTIONAL:
        if importlib.util.find_spec(package) is not None:
            before = rss_bytes()
            importlib.import_module(package)
            found[package] = rss_bytes() - before
    return found


if __name__ == "__main__":
    print(json.dumps(_report(Path(sys.argv[1]), sys.argv[2])))
