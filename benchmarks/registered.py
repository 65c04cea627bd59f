"""Ten thousand adapters in a folder, of which sixteen are in memory: the server's start, its list, its memory (S10).

    python -m benchmarks.registered [--adapters 10000] [--keep]

On the built-in base, with patches of rank 1 that share a file of tensors. Memory is what an adapter adds to the
process.
"""

import json
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import program, scratch, table
from benchmarks.models import make_patch
from benchmarks.pool import resident_bytes

RESIDENT = 16


def make_folder(adapters: int) -> Path:
    """So many patches, each with an alpha of its own, so that each is another adapter."""
    from lorakit.base.find import find_base

    root = scratch() / f"registered-{adapters}"
    if not root.exists():
        patch = make_patch(scratch(), find_base("builtin:tiny"), rank=1, seed=0)
        config = json.loads((patch / "adapter_config.json").read_text())
        staged = root.with_name(f"{root.name}-new")
        shutil.rmtree(staged, ignore_errors=True)
        for number in range(adapters):
            folder = staged / f"t{number}"
            folder.mkdir(parents=True)
            os.link(patch / "adapter_model.safetensors", folder / "adapter_model.safetensors")
            (folder / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 1.0 + number}))
        staged.rename(root)
    return root


def measure(adapters: int) -> dict[str, Any]:
    """Load the folder, then ask for the list through the application itself, without a socket."""
    from starlette.testclient import TestClient

    import lorakit
    from lorakit.serving.adapter_pool import AdapterFolder, AdapterPool
    from lorakit.serving.app import OpenAIServer
    from lorakit.serving.engine import ServingEngine

    root = make_folder(adapters)
    model = lorakit.load("builtin:tiny", dtype="float32")
    pool = AdapterPool(model, RESIDENT)
    folder = AdapterFolder(pool, root, [])
    torch.set_num_threads(1)
    before, began = resident_bytes(), time.perf_counter()
    folder.start()
    started = time.perf_counter() - began
    used = resident_bytes() - before
    folder.close()
    assert len(pool.names) == adapters, f"{len(pool.names)} of {adapters} adapters; {list(pool.failed.values())[:1]}"
    client = TestClient(OpenAIServer(model, ServingEngine(model), "base", pool=pool).app, base_url="http://127.0.0.1")
    lists = []
    for _ in range(10):
        began = time.perf_counter()
        reply = client.get("/v1/models")
        lists.append(time.perf_counter() - began)
        assert len(reply.json()["data"]) == adapters + 1
    return {"adapters": adapters, "resident": RESIDENT, "started": started, "bytes": used / adapters, "lists": lists}


def rates(result: dict[str, Any]) -> dict[str, float]:
    """The figures that the targets speak of."""
    return {
        "10,000 adapters: seconds to start": result["started"],
        "10,000 adapters: ms of their list": 1e3 * statistics.median(result["lists"]),
        "10,000 adapters: bytes of one on disk": result["bytes"],
    }


def show(result: dict[str, Any]) -> None:
    """The table."""
    table(
        [
            (f"{result['adapters']} adapters, {result['resident']} in memory", ""),
            ("seconds to start", f"{result['started']:.1f}"),
            ("ms of /v1/models", f"{1e3 * statistics.median(result['lists']):.0f}"),
            ("bytes of an adapter", f"{result['bytes']:.0f}"),
        ]
    )


if __name__ == "__main__":
    program("registered", measure, show, adapters=10000)
