"""What two processes send in a step when each holds half of the base (C12): counted, not timed.

    python -m benchmarks.gathers [--keep]

Two gathers of the base, one for forward and one for backward; no reduce-scatter of it; the adapter's gradients once.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import program, run_ranks, scratch, table
from benchmarks.models import make_base
from benchmarks.step import rows_of

BACKENDS = ("zero3", "fsdp2")


def rank(backend: str, base: str) -> None:
    """One of the processes: three steps; the first process prints what was sent in one of them."""
    from lorakit.base.loading import load_for_training
    from lorakit.data import collate
    from lorakit.launch.environment import detect_world
    from lorakit.lora import AdapterSpec, adapter_tensors, attach, find_targets
    from lorakit.objectives.cross_entropy import LossModel
    from lorakit.ops.fuse import fuse_model
    from lorakit.parallel import StepSettings, open_engine
    from lorakit.parallel.optimizer import build_optimizer
    from lorakit.parallel.process_group import destroy_process_group
    from lorakit.recipe import BaseSection, ParallelSection

    torch.set_num_threads(1)
    engine = open_engine(ParallelSection(backend=backend, processes=2), detect_world(os.environ))  # type: ignore[arg-type]
    loaded = load_for_training(BaseSection(model=base), Path(base), torch.float32, engine.device, sharded=True)
    spec = AdapterSpec(rank=16)
    attach(loaded.model, find_targets(loaded.model, spec), spec, 0, loaded.read_weight)
    fuse_model(loaded.model)
    adapter = sum(tensor.nbytes for tensor in adapter_tensors(loaded.model).values())
    whole = sum(p.nbytes for p in loaded.model.parameters()) - adapter
    build = partial(build_optimizer, betas=(0.9, 0.999), epsilon=1e-8, weight_decay=0.0)
    engine.prepare(LossModel(loaded.model), build, StepSettings(0, 1.0, lambda step: 1e-4), loaded.weights)
    for step in range(3):
        rows = rows_of(Path(base), "even", 2 * step + engine.rank)
        engine.step(step, [collate(rows, list(range(len(rows))), packing=True)])  # type: ignore[arg-type]
    if engine.rank == 0:
        sent = engine.layout()["collectives_of_a_step"]
        print(json.dumps({"base_bytes": whole, "adapter_bytes": adapter, "sent": sent}), flush=True)
    destroy_process_group()


def measure() -> dict[str, Any]:
    """Each backend once."""
    base = make_base(scratch(), "tiny", torch.float32)
    found: dict[str, Any] = {"shape": "tiny"}
    for backend in BACKENDS:
        found[backend] = run_ranks("benchmarks.gathers", 2, backend, str(base))
    return found


def rates(result: dict[str, Any]) -> dict[str, float]:
    """The figures that the target speaks of."""
    found = {}
    for backend in BACKENDS:
        sent, base, adapter = (result[backend][key] for key in ("sent", "base_bytes", "adapter_bytes"))
        added = sum(sent.get(kind, {}).get("bytes", 0) for kind in ("all_reduce", "reduce_scatter", "reduce"))
        found[f"{backend}: gathered / base"] = sent["all_gather"]["bytes"] / base
        found[f"{backend}: added up / adapter"] = added / adapter
    return found


def show(result: dict[str, Any]) -> None:
    """The table."""
    lines = [("", "base, bytes", "adapter, bytes", "gathered / base", "added up / adapter")]
    told = rates(result)
    for backend in BACKENDS:
        base, adapter = (f"{result[backend][key]:,}" for key in ("base_bytes", "adapter_bytes"))
        gathered, added = (f"{told[f'{backend}: {what}']:.3f}" for what in ("gathered / base", "added up / adapter"))
        lines.append((backend, base, adapter, gathered, added))
    table(lines)


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        rank(*sys.argv[1:])
    else:
        program("gathers", measure, show)
