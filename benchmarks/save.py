"""Writing a patch so that it survives a power cut, beside writing as many bytes with fsync (C11).

python -m benchmarks.save [--pairs 7] [--keep]
"""

import os
import shutil
import time
from typing import Any

import torch

from benchmarks.machine import program, scratch, table
from benchmarks.models import make_base, make_patch
from benchmarks.turns import middle, ratio, take_turns
from lorakit.patch import read_patch, write_patch

SHAPE, RANK = "1.1B", 26  # 83 MB in float32


def measure(pairs: int) -> dict[str, Any]:
    """Both in turn."""
    base = make_base(scratch(), SHAPE, torch.bfloat16)
    patch = read_patch(make_patch(scratch(), base, rank=RANK, seed=0))
    out = scratch() / "save"
    size = 0

    def lorakit() -> dict[str, Any]:
        nonlocal size
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        began = time.perf_counter()
        write_patch(out / "patch", patch)
        seconds = time.perf_counter() - began
        size = sum(file.stat().st_size for file in (out / "patch").iterdir())
        return {"seconds": seconds}

    def disk() -> dict[str, Any]:  # as many bytes in one file, on the disk
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        data = os.urandom(size)
        began = time.perf_counter()
        with (out / "bytes").open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return {"seconds": time.perf_counter() - began}

    found = take_turns({"disk": disk, "lorakit": lorakit}, pairs)
    shutil.rmtree(out)
    return {"bytes": size, **found}


def rates(result: dict[str, Any]) -> dict[str, float]:
    """The figure that the target speaks of."""
    return {"patch save, of disk speed": 1 / ratio(result["lorakit"], result["disk"])}


def show(result: dict[str, Any]) -> None:
    """The table."""
    lines = [(f"{result['bytes'] / 1e6:.0f} MB", "seconds", "MB/s", "of disk speed")]
    for name, label in (("disk", "write + fsync"), ("lorakit", "patch, durable")):
        seconds = middle(result[name])
        share = 1 / ratio(result[name], result["disk"])
        lines.append((label, f"{seconds:.3f}", f"{result['bytes'] / seconds / 1e6:.0f}", f"{share:.0%}"))
    table(lines)


if __name__ == "__main__":
    program("save", measure, show, pairs=7)
