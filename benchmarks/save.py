"""Writing a patch so that it survives a power cut, beside writing as many bytes with fsync (C11).

python -m benchmarks.save [--pairs 7] [--keep]
"""

import argparse
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import facts, keep, scratch, table
from benchmarks.models import make_base, make_patch
from benchmarks.turns import middle, ratio

SHAPE, RANK = "1.1B", 26  # 83 MB in float32


def plain(data: bytes, target: Path) -> None:
    """As many bytes in one file, on the disk."""
    with target.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def measure(pairs: int) -> dict[str, Any]:
    """Both in turn."""
    from lorakit.patch import read_patch, write_patch

    base = make_base(scratch(), SHAPE, torch.bfloat16)
    patch = read_patch(make_patch(scratch(), base, rank=RANK, seed=0))
    out = scratch() / "save"
    found: dict[str, list[dict[str, float]]] = {"disk": [], "lorakit": []}
    size = 0
    for number in range(-1, pairs):
        for name in found if number % 2 else reversed(found):
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            data = os.urandom(size) if name == "disk" else b""
            began = time.perf_counter()
            if name == "disk":
                plain(data, out / "bytes")
            else:
                write_patch(out / "patch", patch)
            seconds = time.perf_counter() - began
            if name == "lorakit":
                size = sum(file.stat().st_size for file in (out / "patch").iterdir())
            if number >= 0:
                found[name].append({"seconds": seconds})
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
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/")
    options = parser.parse_args()
    print(facts()["hardware"])
    figures = measure(options.pairs)
    show(figures)
    if options.keep:
        keep("save", figures)
