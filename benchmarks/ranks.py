"""A process of a benchmark that takes several: base and adapter in the engine of a layout, ready to step.

``run_ranks`` starts the processes; each runs the ``rank`` of the benchmark's module.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import rss_bytes
from lorakit.base.loading import load_for_training
from lorakit.launch.environment import detect_world
from lorakit.lora import AdapterSpec, adapter_tensors, attach, find_targets
from lorakit.lora.targets import Target
from lorakit.objectives.cross_entropy import LossModel
from lorakit.ops.fuse import fuse_model
from lorakit.ops.packed_attention import enable_packed_attention
from lorakit.ops.recompute import save_packed
from lorakit.parallel import Engine, StepSettings, open_engine
from lorakit.parallel.adapter_state import build_optimizer
from lorakit.parallel.setup import destroy_process_group
from lorakit.recipe import BaseSection, ParallelSection, TrainSection

RANK = 16


@dataclass(frozen=True)
class Prepared:
    """An engine, and sizes that it was given: the full base, the full adapter, and the process before either."""

    engine: Engine
    loss_model: LossModel
    targets: list[Target]
    base_bytes: int
    adapter_bytes: int
    process_bytes: int

    def report(self, **result: Any) -> None:
        """Print a result from the first process."""
        if self.engine.group.rank == 0:
            print(json.dumps(result), flush=True)

    def largest(self, value: int) -> int:
        """The largest of the processes' values. Collective."""
        return max(self.engine.group.all_gather(value))


@contextmanager
def prepared(
    base: Path,
    dtype: torch.dtype = torch.float32,
    *,
    clip: float | None = 1.0,
    optimizer: str = "adamw",
    **parallel: Any,
) -> Iterator[Prepared]:
    """Yield this process's engine; ``parallel``: keys of a recipe's section. Ends the process group."""
    torch.set_num_threads(1)
    engine = open_engine(ParallelSection(**parallel), detect_world(os.environ))
    before = rss_bytes()
    loaded = load_for_training(BaseSection(model=str(base)), base, dtype, engine.device, sharded=engine.shards_base)
    spec = AdapterSpec(rank=RANK)
    targets = find_targets(loaded.model, spec)
    attach(loaded.model, spec, 0, loaded.read_weight)
    fuse_model(loaded.model)
    adapter = sum(tensor.nbytes for tensor in adapter_tensors(loaded.model).values())
    full = sum(p.nbytes for p in loaded.model.parameters()) - adapter
    build = partial(build_optimizer, TrainSection.model_validate({"optimizer": optimizer}))
    loss_model = LossModel(loaded.model)
    engine.prepare(loss_model, build, StepSettings(0, clip, lambda step: 1e-4), loaded.weights)
    loss_model.packed_attention = enable_packed_attention(loaded.model)
    yield Prepared(engine, loss_model, targets, full, adapter, before)
    destroy_process_group()


@contextmanager
def saved_for_backward() -> Iterator[list[int]]:
    """Collect the bytes of the tensors that the block saves; those of parameters aside, shared memory once.

    They are known after the block. A forward may look at what it has saved, so that is no sign of backward.
    """
    sizes: dict[int, int] = {}
    total: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with save_packed(pack):
        yield total
    total.append(sum(sizes.values()))
