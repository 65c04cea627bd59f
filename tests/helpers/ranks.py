"""Run real training steps in several processes: ``python -m tests.helpers.ranks FOLDER``, once for every rank.

FOLDER/cases.json lists the cases; rank 0 writes FOLDER/<name>.pt for each. `run_cases` writes the cases, starts the
ranks and returns what rank 0 wrote.
"""

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.collectives import Collectives, count_collectives
from lorakit.base.find import find_base
from lorakit.base.layers import checkpoint_layers
from lorakit.base.loading import LoadedBase, load_for_training
from lorakit.base.transformers_io import add_new_tokens, load_tokenizer
from lorakit.data.batch import Batch
from lorakit.data.dataset import MismatchedRows
from lorakit.data.row_settings import RowSettings
from lorakit.data.sampler import BatchSampler
from lorakit.errors import RunError
from lorakit.files.safetensors import MODEL_DTYPES
from lorakit.launch.environment import detect_world
from lorakit.launch.libraries import quiet_libraries, without_deprecations
from lorakit.lora import AdapterSpec, attach
from lorakit.objectives.cross_entropy import LossModel
from lorakit.objectives.objective import SFT, Objective
from lorakit.objectives.pairs import build_objective
from lorakit.ops import products
from lorakit.ops.dropout import add_embedding_noise
from lorakit.ops.fuse import fuse_model
from lorakit.ops.recompute import RecomputedInput
from lorakit.parallel import Engine, EngineState, StepSettings, open_engine
from lorakit.parallel.adapter_state import build_optimizer
from lorakit.parallel.setup import destroy_process_group
from lorakit.recipe import BaseSection, ParallelSection, TrainSection
from lorakit.recipe.objective import ObjectiveSection
from lorakit.training.model_checks import check_sequence, check_stages, enable_packing, probe_rows, verify_chunked_loss
from tests.helpers.fork_server import PIPE, ROOT, STDOUT, start_python
from tests.helpers.rows import tokenize_rows
from tests.parallel.axis_bounds import count_attentions, message_problems

Case = dict[str, Any]
"""A name, the recipe's `parallel` section, and what `build` and `sampler` read; missing keys have defaults."""
STEPS = 4
"""Of a case that names no other number."""
EMBED = ObjectiveSection(name="embed", pooling="mean", temperature=0.5, matryoshka_dims=(8,))
OBJECTIVES = {
    "sft": SFT,
    # two terms with normalisers of their own, the second not linear in the losses
    "two terms": Objective(
        counts=lambda batch: (float(batch.num_label_tokens), float(len(batch.row_indices))),
        terms=lambda scores: (scores.losses.sum(), scores.losses.square().sum() * 0.05),
        metrics={
            "accuracy": lambda scores, batch: (scores.hits.sum(), float(batch.num_label_tokens)),
            "loss_per_row": lambda scores, batch: (scores.losses.detach().sum(), float(len(batch.row_indices))),
        },
        per="token",
    ),
    # of two rows the first is the better one; compared with the adapter before the first step
    "pairs": build_objective("ipo", {"beta": 0.5, "sft_weight": 0.1}),
    # with a first pass over mismatched rows
    "kto": build_objective("kto", {"beta": 0.5, "desirable_weight": 1.0, "undesirable_weight": 1.5}),
    # with a first pass over the rows themselves, which has the dropout of the second one
    "embed": build_objective("embed", EMBED.settings),
}


# --- in pytest ------------------------------------------------------------------------------------------------------


def run_cases(folder: Path, processes: int, cases: Sequence[Case]) -> dict[str, Any]:
    """Results of the cases by name. ``folder`` holds the bases and rows.jsonl; a single process has no launcher."""
    own = Path(tempfile.mkdtemp(dir=folder))
    config = {"base": str(folder / "base"), "rows": str(folder / "rows.jsonl"), "cases": list(cases)}
    (own / "cases.json").write_text(json.dumps(config))
    launched = cases[0]["parallel"]["backend"] != "single"
    port = free_port()
    ranks = [
        start_python(
            "-m", "tests.helpers.ranks", own, cwd=ROOT, env=os.environ | (as_rank(rank, processes, port) if launched else {}),
            stdout=PIPE, stderr=STDOUT,
        )
        for rank in range(processes)
    ]  # fmt: skip
    while any(rank.poll() is None for rank in ranks) and not any(rank.returncode for rank in ranks):
        time.sleep(0.02)
    failed = [rank for rank in ranks if rank.returncode]
    for rank in ranks:
        rank.kill_group()
    output = [f"exit {rank.returncode}: {rank.communicate()[0][-3000:]}" for rank in failed or ranks]
    assert not failed, "\n".join(output)
    return {case["name"]: torch.load(own / f"{case['name']}.pt") for case in cases}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def as_rank(rank: int, size: int, port: int) -> dict[str, str]:
    """The variables of a launcher that does nothing else: no one ends a rank but itself."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


# --- in a rank ------------------------------------------------------------------------------------------------------


def load(engine: Engine, base: Path, case: Case) -> LoadedBase:
    section = BaseSection(model="base", quantize=case.get("quantize", "none"))
    dtype = MODEL_DTYPES[case.get("dtype", "float32")]
    return load_for_training(section, base, dtype, engine.device, sharded=engine.shards_base)


def build(engine: Engine, base: Path, case: Case) -> None:
    """Give the case's model to the engine."""
    loaded = load(engine, base, case)
    dtype = MODEL_DTYPES[case.get("dtype", "float32")]
    model, rank = loaded.model, case.get("rank", 3)
    settings = {"rank": rank, "alpha": 2.0 * rank, "dropout": case.get("dropout", 0.0)} | case.get("adapter", {})
    spec = AdapterSpec(**{key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()})
    attach(model, spec, 0, loaded.read_weight)
    if "neftune" in case:
        add_embedding_noise(model, case["neftune"])
    fuse_model(model)
    if case.get("checkpointing"):
        checkpoint_layers(model, offload=case["checkpointing"] == "offload")
    train = TrainSection(
        optimizer=case.get("optimizer", "adamw"), weight_decay=0.01, loraplus_lr_ratio=case.get("ratio")
    )
    loss_model = LossModel(model, OBJECTIVES[case.get("objective", "sft")], label_smoothing=case.get("smoothing", 0.0))
    products.MIN_NUMBERS = 0
    products.use_products(loss_model, case.get("products", "torch"))
    engine.prepare(
        loss_model,
        partial(build_optimizer, train),
        StepSettings(0, case.get("max_grad_norm", 1.0), lambda step: 0.01, dtype is torch.float16),
        loaded.weights,
    )
    if "loss_scale" in case:
        engine.adapter.scale.value = case["loss_scale"]


def add_mean(norm: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    """Give every token of a line the mean of all of them."""
    return output + output.mean(1, keepdim=True)


def sampler(engine: Engine, rows: Path, case: Case) -> BatchSampler:
    """Sample steps of 7 rows of 20: the last of an epoch has 6."""
    tokenizer = load_tokenizer(find_base("builtin:tiny"))
    add_new_tokens(tokenizer, list(case.get("adapter", {}).get("new_tokens", {})))
    file = rows.with_name(case.get("rows", rows.name))
    of_texts = EMBED.row_settings if case.get("objective") == "embed" else {}
    settings = RowSettings(64, "truncate", **{"verdicts": case.get("objective") == "kto"} | of_texts)
    prepared = tokenize_rows(str(file), "train", tokenizer, settings)
    return BatchSampler(
        prepared, case.get("batch_size", 7), case.get("micro_batch_size", 7), case.get("packing", True), 0,
        engine.mesh.data.rank, engine.mesh.data.size, OBJECTIVES[case.get("objective", "sft")].group_size,
    )  # fmt: skip


def with_references(engine: Engine, batches: BatchSampler) -> BatchSampler:
    """Give the batches what the engine's objective compares with, as a run does."""
    objective = engine._objective
    if not objective.reads_references:
        return batches
    if objective.first_pass is not None:
        mismatched = replace(batches, rows=MismatchedRows(batches.rows))
        references = engine.score(mismatched.eval_micro_batches(), len(batches.rows))
        batches = replace(batches, mismatched=replace(mismatched, references=references))
    return replace(batches, references=engine.score(batches.eval_micro_batches(), len(batches.rows)))


def run(engine: Engine, base: Path, rows: Path, case: Case) -> dict[str, Any]:
    """Take the case's steps and return their losses, the tensors after them, and what every rank counted."""
    build(engine, base, case)
    batches = sampler(engine, rows, case)
    loss_model = engine._loss_model
    if engine.mesh.pipeline.size > 1:
        if case.get("broken"):
            loss_model.model.model.norm.register_forward_hook(add_mean)  # on the last stage alone
        try:
            full = load(engine, base, case)
            probe = probe_rows(batches, engine.device)
            check_stages(loss_model, probe, engine.mesh, full.model, full.weights)
        except RunError as problem:
            return {"refused": str(problem)}
        verify_chunked_loss(loss_model, probe_rows(batches, engine.device), engine.group)
    if engine.mesh.sequence.size > 1 or (engine.mesh.pipeline.size > 1 and case.get("packing", True)):
        enable_packing(loss_model, probe_rows(batches, engine.device))
    if engine.mesh.sequence.size > 1:
        check_sequence(loss_model, probe_rows(batches, engine.device), engine.mesh)
    batches = with_references(engine, batches)
    untrained = engine.evaluate(batches.eval_micro_batches(), lambda: False).loss if case.get("untrained") else None
    first = 0
    if "resume" in case:
        saved = torch.load(case["resume"])
        engine.load_state_dict(EngineState(saved["adapter"], saved["optimizer"]))
        first = len(saved["losses"])
    losses, norms, metrics = [], [], []
    counted: dict[str, Any] = {}
    with count_recomputed() as recomputed:
        for step in range(first, case.get("steps", STEPS)):
            micro_batches = batches.step(step)
            if step == first + 1 and loss_model.objective.first_pass is None:
                with count_collectives() as sent, count_attentions() as attentions:
                    report = engine.step(step, micro_batches)
                counted = counts_of_step(engine, micro_batches, sent)
            else:
                report = engine.step(step, micro_batches)
            losses.append(report.loss)
            norms.append(report.grad_norm)
            # before the first update all rewards are 0, and their signs are rounding
            left_out = () if step else ("rewards/accuracies",)
            metrics.append([value for name, value in report.metrics.items() if name not in left_out])
    problems = message_problems(engine, counted, attentions) if counted and engine.group.size > 1 else []
    assert not problems, problems
    return {
        "losses": losses, "norms": norms, "metrics": metrics, "adapter": engine.adapter_state_dict(),
        "eval": engine.evaluate(batches.eval_micro_batches(), lambda: False).loss if case.get("evaluate", True) else None,
        "untrained": untrained,
        "optimizer": engine.state_dict().optimizer, "unreached": engine.tensors_without_gradient(),
        "ranks": engine.group.all_gather({**engine.layout(), **counted}),
        "scale": engine.adapter.scale.value,
        "recomputed": sum(recomputed),
    }  # fmt: skip


def counts_of_step(engine: Engine, micro_batches: Sequence[Batch], sent: Collectives) -> dict[str, Any]:
    """What this rank has sent in a step, and the step's size."""
    return {
        "counted_step": {
            "micro_batches": len(micro_batches),
            "tokens": sum(engine.slice(batch).input_ids.numel() for batch in micro_batches),
        },
        "collectives_of_a_step": sent.counts(),
        "collectives_by_axis": sent.by_axis(engine.mesh),
        "groups_of_no_axis": sent.groups_of_no_axis(engine.mesh),
    }


@contextmanager
def count_recomputed() -> Iterator[list[int]]:
    """A one in the list for each time that a layer's input was recomputed in backward."""
    ones: list[int] = []
    original = RecomputedInput.get

    def counted(recomputed: RecomputedInput) -> torch.Tensor:
        ones.append(1)
        return original(recomputed)

    RecomputedInput.get = counted  # type: ignore[method-assign]
    yield ones
    RecomputedInput.get = original  # type: ignore[method-assign]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    config = json.loads((folder / "cases.json").read_text())
    world = detect_world(os.environ)
    for case in config["cases"]:
        parallel = ParallelSection(processes=world.size if world else 1, **case["parallel"])
        with quiet_libraries():
            engine = open_engine(parallel, world)
        with without_deprecations():
            result = run(engine, Path(config["base"]).parent / case.get("base", "base"), Path(config["rows"]), case)
        if engine.group.rank == 0:
            torch.save(result, folder / f"{case['name']}.pt")
        if world:
            engine.group.all_reduce_sum(0)
    destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
