"""Run real training steps in several processes: ``python -m tests.helpers.ranks FOLDER``, under torchrun or alone.

FOLDER/cases.json lists the cases; the first process writes FOLDER/<name>.pt for each.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lorakit.base.layers import checkpoint_layers
from lorakit.base.load import find_base, load_tokenizer
from lorakit.base.loading import load_for_training
from lorakit.data import BatchSampler, RowSettings, tokenize_rows
from lorakit.launch.environment import detect_world
from lorakit.launch.quiet import quiet_libraries, without_deprecations
from lorakit.lora import AdapterSpec, attach, find_targets
from lorakit.ops.recompute import RecomputedInput
from lorakit.parallel import Engine, StepSettings, open_engine
from lorakit.parallel.optimizer import build_optimizer
from lorakit.parallel.process_group import destroy_process_group
from lorakit.recipe import BaseSection, ParallelSection

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build(engine: Engine, base: Path, case: dict[str, Any]) -> None:
    """The case's model in the engine."""
    dtype = DTYPES[case.get("dtype", "float32")]
    section = BaseSection(model="base", quantize=case.get("quantize", "none"))
    loaded = load_for_training(section, base, dtype, engine.device, sharded=engine.shards_base)
    model, rank = loaded.model, case.get("rank", 3)
    settings = {"rank": rank, "alpha": 2.0 * rank, "dropout": case.get("dropout", 0.0)} | case.get("adapter", {})
    spec = AdapterSpec(**{key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()})
    attach(model, find_targets(model, spec), spec, 0, loaded.stored)
    if case.get("checkpointing"):
        checkpoint_layers(model, on_host=case["checkpointing"] == "offload")
    optimizer = partial(
        build_optimizer, name=case.get("optimizer", "adamw"), betas=(0.9, 0.999), epsilon=1e-8, weight_decay=0.01,
        ratio=case.get("ratio"),
    )  # fmt: skip
    engine.prepare(
        model,
        optimizer,
        StepSettings(0, case.get("max_grad_norm", 1.0), lambda step: 0.01, dtype is torch.float16),
        loaded.read,
    )
    if "loss_scale" in case:
        engine._scale.value = case["loss_scale"]  # type: ignore[attr-defined]


def batches_of(engine: Engine, rows: Path, case: dict[str, Any]) -> BatchSampler:
    """Steps of 7 rows of 41: the last of an epoch has 6."""
    tokenizer = load_tokenizer(find_base("builtin:tiny"))
    prepared = tokenize_rows(str(rows), "train", tokenizer, RowSettings(64, "truncate", "stop", "answer"))
    return BatchSampler(
        prepared, case.get("batch_size", 7), case.get("micro_batch_size", 7), case.get("packing", True), 0,
        engine.group.rank, engine.group.size,
    )  # fmt: skip


def run(engine: Engine, base: Path, rows: Path, case: dict[str, Any]) -> dict[str, Any]:
    """What the case's steps gave."""
    build(engine, base, case)
    batches = batches_of(engine, rows, case)
    first = 0
    if "resume" in case:
        saved = torch.load(case["resume"])
        engine.restore(saved["adapter"], saved["optimizer"])
        first = len(saved["losses"])
    losses, norms = [], []
    with recomputable() as numbers:
        for step in range(first, case.get("steps", 12)):
            report = engine.step(step, batches.step(step))
            losses.append(report.loss)
            norms.append(report.grad_norm)
    evaluated = engine.evaluate(
        (batch for chosen in batches.eval_batches() for batch in batches.micro_batches(chosen)), lambda: False
    )
    return {
        "losses": losses, "norms": norms, "eval": evaluated, "adapter": engine.gather(),
        "optimizer": engine.gather_optimizer(), "unreached": engine.tensors_without_gradient(), "ranks": engine.group.all_gather(engine.observed()),
        "scale": engine._scale.value,  # type: ignore[attr-defined]
        "recomputable": sum(numbers),
    }  # fmt: skip


@contextmanager
def recomputable() -> Iterator[list[int]]:
    """A one for each time that a layer's input was made again instead of having been kept."""
    numbers: list[int] = []
    made = RecomputedInput.get

    def counted(again: RecomputedInput) -> torch.Tensor:
        numbers.append(1)
        return made(again)

    RecomputedInput.get = counted  # type: ignore[method-assign]
    yield numbers
    RecomputedInput.get = made  # type: ignore[method-assign]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    told = json.loads((folder / "cases.json").read_text())
    world = detect_world(os.environ)
    for case in told["cases"]:
        parallel = ParallelSection(processes=world.size if world else 1, **case["parallel"])
        with quiet_libraries():
            engine = open_engine(parallel, world)
        with without_deprecations():
            result = run(engine, Path(told["base"]).parent / case.get("base", "base"), Path(told["rows"]), case)
        if engine.rank == 0:
            torch.save(result, folder / f"{case['name']}.pt")
        if world:
            from accelerate.state import AcceleratorState

            AcceleratorState._reset_state()
            engine.group.all_reduce_sum(0)
    destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
