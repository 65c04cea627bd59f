"""A thousand adapters of which sixteen are in memory: the memory of all, and the wait for one that is on disk (S5).

    python -m benchmarks.pool [--shape 1.1B] [--adapters 1000] [--pairs 9] [--keep]

The patches share a few files of tensors, with other settings, so each is another adapter. Before a file is read, by
itself or for a request, the kernel's copy of it in memory is dropped.
"""

import ctypes
import gc
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.adapters import variant
from benchmarks.machine import program, rss_bytes, scratch, table
from benchmarks.models import make_base, make_patch
from benchmarks.turns import Side, middle, serve, take_turns

RESIDENT, RANK, FILES = 16, 16, 8
TENSORS = "adapter_model.safetensors"


def resident_bytes() -> int:
    """Resident memory of this process without what is freed already."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return rss_bytes()


def drop(file: Path) -> None:
    """Drop the kernel's copy of a file."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def side(base: str, *folders: str) -> None:
    """A pool of all adapters, then rounds: a file read by itself, and a request to its adapter, which is on disk."""
    import lorakit
    from lorakit.serving.adapter_pool import AdapterPool

    model = lorakit.load(base, dtype="float32")
    pool = AdapterPool(model, RESIDENT)
    pool.load("a0", folders[0])  # what the first one imports and makes
    pool.remove("a0")
    before = resident_bytes()
    seconds = []
    for number, folder in enumerate(folders):
        began = time.perf_counter()
        pool.load(f"a{number}", folder)
        seconds.append(time.perf_counter() - began)
    after = resident_bytes()
    number = 0

    def step() -> dict[str, Any]:
        nonlocal number
        file = Path(folders[number]) / TENSORS
        drop(file)
        began = time.perf_counter()
        file.read_bytes()
        read = time.perf_counter() - began
        drop(file)
        assert not pool.model.is_loaded(f"a{number}")
        began = time.perf_counter()
        pool.adapter(f"a{number}")
        waited = time.perf_counter() - began
        number += 1
        return {"read": read, "waited": waited}

    serve(step, load_seconds=sum(seconds) / len(seconds), bytes_before=before, bytes_after=after)


def measure(shape: str, adapters: int, pairs: int) -> dict[str, Any]:
    """Register all, then ask for some that are on disk."""
    base = make_base(scratch(), shape, torch.float32)
    patches = [make_patch(scratch(), base, rank=RANK, seed=seed) for seed in range(FILES)]
    folders = [variant(patches[number % FILES], number) for number in range(adapters)]
    size = (patches[0] / TENSORS).stat().st_size
    pool = Side("benchmarks.pool", str(base), *map(str, folders))
    rounds = take_turns({"pool": pool.step}, pairs)["pool"]
    end = {"bytes_of_a_patch": size, **pool.ready}
    pool.end()
    return {"shape": shape, "adapters": adapters, "resident": RESIDENT, "rank": RANK, **end, "pool": rounds}


def extra_bytes(result: dict[str, Any]) -> float:
    """Memory above the base and the tensors of the resident adapters."""
    used = result["bytes_after"] - result["bytes_before"]
    return float(used - result["resident"] * result["bytes_of_a_patch"])


def rates(result: dict[str, Any]) -> dict[str, float]:
    """The figures that the targets speak of."""
    rounds = result["pool"]
    return {
        "1,000 adapters, 16 in memory: MB above those": extra_bytes(result) / 1e6,
        "wait for an adapter on disk / reading its file": statistics.median(
            one["waited"] / one["read"] for one in rounds
        ),
    }


def show(result: dict[str, Any]) -> None:
    """The table."""
    rounds = result["pool"]
    waited, read = middle(rounds, "waited") * 1e3, middle(rounds, "read") * 1e3
    table([
        (f"{result['shape']}, rank {result['rank']}", ""),
        ("adapters, in memory", f"{result['adapters']}, {result['resident']}"),
        ("MB of a patch", f"{result['bytes_of_a_patch'] / 1e6:.0f}"),
        ("ms to register one", f"{result['load_seconds'] * 1e3:.0f}"),
        ("MB above base + 16", f"{extra_bytes(result) / 1e6:.0f}"),
        ("ms to read a file of one", f"{read:.0f}"),
        ("ms that a request for one on disk waits", f"{waited:.0f}"),
    ])  # fmt: skip
    print()
    for name, rate in rates(result).items():
        print(f"{name:<48} {rate:.3f}")


if __name__ == "__main__":
    program("pool-{shape}", measure, show, shape="1.1B", adapters=1000, pairs=9)
