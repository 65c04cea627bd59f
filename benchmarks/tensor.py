"""What a process holds and sends where two share every weight (P3): counted, not timed.

    python -m benchmarks.tensor [--keep]

Half of the base in each; the messages of the base's own cut, and those of the adapter. The peak of a process is that of
loading and two steps of 128 tokens, beside one process that has all of the base. Activations are the bytes that forward
saves for backward, with a part of the tokens between the blocks in each process, and with all of them in each.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import peak_bytes, program, rss_bytes, run_ranks, scratch, table
from benchmarks.models import SHAPES, make_base
from benchmarks.sides import Row, Rows

SHAPE = "100M"
NUM_LAYERS = SHAPES[SHAPE]["num_hidden_layers"]
BASES_SUMS = (1 + 2 * NUM_LAYERS + 2) + (2 * NUM_LAYERS - 1 + 1)
"""forward: embedding, two of each layer, two of the loss; backward: two of each layer but the first one's attention,
whose input has no gradient, and one of the loss"""
BASES_PARTS = (1 + 2) + 2 * (2 * NUM_LAYERS) + 1 + 2 * (2 * NUM_LAYERS)
"""with the tokens in parts: embedding and loss in full; in each layer a gather of two inputs and a scatter of two
outputs, forward, and the other way round backward, but the first input, in whose place is the loss's; a gather for the
loss"""
LAYOUTS = {
    "ddp x 1": ("ddp", 1, 1, "parts"),
    "ddp, tensor 2, all tokens": ("ddp", 2, 2, "all"),
    "ddp, tensor 2": ("ddp", 2, 2, "parts"),
    "fsdp2, data 2 x tensor 2": ("fsdp2", 4, 2, "parts"),
}


@contextmanager
def saved_for_backward() -> Iterator[list[int]]:
    """Collect the bytes of the tensors that forward saves; those of parameters aside, shared memory once."""
    sizes: dict[int, int] = {}
    total: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not total and not isinstance(tensor, torch.nn.Parameter):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        if not total:  # backward begins
            total.append(sum(sizes.values()))
        return tensor

    pack.unpacks_repeatedly = True  # type: ignore[attr-defined] # as lorakit's own hooks are marked
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield total


def rank(backend: str, processes: str, tensor: str, tokens: str, base: str) -> None:
    """One of the processes: two steps; the first process prints what it holds and sends."""
    from lorakit.base.loading import load_for_training
    from lorakit.data import collate
    from lorakit.launch.environment import detect_world
    from lorakit.lora import AdapterSpec, attach, find_targets
    from lorakit.objectives.cross_entropy import LossModel
    from lorakit.ops.fuse import fuse_model
    from lorakit.parallel import StepSettings, open_engine
    from lorakit.parallel.optimizer import build_optimizer
    from lorakit.parallel.process_group import destroy_process_group
    from lorakit.recipe import BaseSection, ParallelSection

    torch.set_num_threads(1)
    parallel = ParallelSection(backend=backend, processes=int(processes), tensor=int(tensor))  # type: ignore[arg-type]
    engine = open_engine(parallel, detect_world(os.environ))
    before = rss_bytes()
    section = BaseSection(model=base)
    loaded = load_for_training(section, Path(base), torch.float32, engine.device, sharded=engine.shards_base)
    spec = AdapterSpec(rank=16)
    attach(loaded.model, find_targets(loaded.model, spec), spec, 0, loaded.read_weight)
    fuse_model(loaded.model)
    build = partial(build_optimizer, betas=(0.9, 0.999), epsilon=1e-8, weight_decay=0.0)
    loss_model = LossModel(loaded.model)
    engine.prepare(loss_model, build, StepSettings(0, 1.0, lambda step: 1e-4), loaded.weights)
    if loss_model.token_parts is not None and tokens == "all":
        loss_model.token_parts.problem = "all tokens, to measure"
    numbers = np.random.default_rng(0)
    for step in range(2):
        rows = Rows(Row(numbers.integers(0, SHAPES[SHAPE]["vocab_size"], 64), np.ones(64, bool)) for _ in range(2))
        with saved_for_backward() as saved:
            engine.step(step, [collate(rows, [0, 1], packing=True)])  # type: ignore[arg-type]
    if engine.rank == 0:
        layout = engine.layout()
        sent = layout["collectives_by_axis"].get("tensor", {})
        result = {
            "base_bytes": layout["base_bytes"], "sent": sent, "peak_bytes": peak_bytes() - before,
            "saved_bytes": saved[0],
        }  # fmt: skip
        print(json.dumps(result), flush=True)
    destroy_process_group()


def measure() -> dict[str, Any]:
    """Each layout once."""
    base = make_base(scratch(), SHAPE, torch.float32)
    measured: dict[str, Any] = {"shape": SHAPE}
    for name, (backend, processes, tensor, tokens) in LAYOUTS.items():
        arguments = (backend, str(processes), str(tensor), tokens, str(base))
        measured[name] = run_ranks("benchmarks.tensor", processes, *arguments)
    return measured


def rates(result: dict[str, Any]) -> dict[str, float]:
    """The figures that the target speaks of."""
    alone, *others = LAYOUTS
    figures = {}
    for name in others:
        base = BASES_SUMS if LAYOUTS[name][3] == "all" else BASES_PARTS
        messages = sum(count["calls"] for count in result[name]["sent"].values())
        figures[f"{name}: base / one process"] = result[name]["base_bytes"] / result[alone]["base_bytes"]
        figures[f"{name}: messages beyond the base's own"] = messages - base
        figures[f"{name}: activations / one process"] = result[name]["saved_bytes"] / result[alone]["saved_bytes"]
        # a sum that all get is a reduce-scatter and an all-gather
        figures[f"{name}: MB sent"] = (
            sum(count["bytes"] * (2 if kind == "all_reduce" else 1) for kind, count in result[name]["sent"].items())
            / 2e6
        )
    return figures


def show(result: dict[str, Any]) -> None:
    """The table."""
    columns = {"base, MB": "base_bytes", "peak above imports, MB": "peak_bytes", "activations, MB": "saved_bytes"}
    rated = ("base / one process", "activations / one process", "messages beyond the base's own", "MB sent")
    figures = rates(result)
    lines = [("", *columns, *rated)]
    for name in LAYOUTS:
        values = [f"{result[name][key] / 1e6:,.1f}" for key in columns.values()]
        shares = [figures.get(f"{name}: {what}") for what in rated]
        lines.append((name, *values, *("" if share is None else f"{share:,.3f}" for share in shares)))
    table(lines)


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        rank(*sys.argv[1:])
    else:
        program("tensor", measure, show)
