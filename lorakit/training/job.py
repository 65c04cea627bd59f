"""A training run, assembled: engine, base with its adapter, rows, optimizer."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lorakit.base.dtype import DtypeChoice, choose_dtype
from lorakit.base.layers import checkpoint_layers
from lorakit.base.load import find_base, load_tokenizer
from lorakit.base.loading import quantization_facts
from lorakit.data import BatchSampler, TokenDataset
from lorakit.data.token_cache import load_split
from lorakit.parallel import Engine, FillParameter, Group, StepSettings
from lorakit.parallel.optimizer import build_optimizer, learning_rate
from lorakit.patch import fingerprint, open_base_files
from lorakit.recipe import Recipe
from lorakit.recipe.schema import count_steps, count_warmup_steps
from lorakit.training.adapting import AdaptedBase, adapted_base, adapted_names
from lorakit.training.checkpoint import Checkpoints
from lorakit.training.compile import CompiledLayers
from lorakit.training.model_checks import check_positions, enable_packing, verify_shortcuts


@dataclass(frozen=True)
class Job:
    """Everything a run needs, ready for its first step."""

    recipe: Recipe
    output: Path
    model: nn.Module
    engine: Engine
    dtype: DtypeChoice
    adapted: AdaptedBase
    batches: BatchSampler
    held_out: BatchSampler | None
    base_fingerprint: dict[str, Any]
    checkpoints: Checkpoints
    total_steps: int
    architecture: str
    compiled: CompiledLayers | None = None

    def data_facts(self) -> dict[str, Any]:
        """What the rows were: sources, digest, and what became of them."""
        sets = {"train": self.batches.rows} | ({"eval": self.held_out.rows} if self.held_out else {})
        return {
            name: {"sources": rows.sources, "digest": rows.digest, **asdict(rows.counts)} for name, rows in sets.items()
        }

    def base_facts(self) -> dict[str, Any]:
        """Which base it is."""
        return {"model": self.recipe.base.model, "architecture": self.architecture, **self.base_fingerprint}


def build_job(recipe: Recipe, engine: Engine, recorded: Mapping[str, Any]) -> Job:
    """Load and connect all parts of a run. ``recorded`` holds what an interrupted run had chosen.

    Raises:
        LorakitError: base, data or targets are not usable; nothing has been written but the token cache.
    """
    group = engine.group
    group.local_rank_0_first(lambda: load_data(recipe))  # one process of a machine makes what the others find made
    folder, rows, held_out = group.run_on_all(lambda: load_data(recipe))
    dtype = group.run_on_rank_0(lambda: choose_dtype(recorded.get("dtype", recipe.base.dtype), engine.device))
    if "dtype" in recorded:
        dtype = DtypeChoice(dtype.dtype, recorded["dtype_why"])
    engine.phase("loading the base")
    adapted = group.run_on_all(lambda: adapted_base(recipe, engine, folder, dtype.dtype, (rows, held_out)))
    model = adapted.base.model
    identity = fingerprint(open_base_files(folder), adapted_names(model))
    if (packing := quantization_facts(model)) is not None:
        identity["packed"] = packing
    digests = {"rows": rows.digest, "held-out rows": held_out.digest if held_out else None}
    group.check_same("base and rows", {"base": identity, **digests})
    job = Job(
        recipe, Path(recipe.output), model, engine, dtype, adapted, _batches(recipe, rows, group),
        _batches(recipe, held_out, group) if held_out else None, identity,
        Checkpoints(Path(recipe.output) / "checkpoints", recipe.train.keep_checkpoints),
        count_steps(recipe, len(rows)), 
        type(model).__name__,
    )  # fmt: skip
    group.run_on_all(lambda: check_positions(model, recipe.data.max_tokens))
    _prepare_engine(job, adapted.base.read)
    verify_shortcuts(engine.loss_model, job.batches, engine.device, group)
    if recipe.data.packing:
        enable_packing(engine.loss_model, job.batches, engine.device)
    return replace(job, compiled=CompiledLayers(model)) if recipe.train.compile else job


def load_data(recipe: Recipe) -> tuple[Path, TokenDataset, TokenDataset | None]:
    """The base's folder and the tokenised rows."""
    folder = find_base(recipe.base.model, recipe.base.revision)
    tokenizer = load_tokenizer(folder)
    rows = load_split(recipe.data, recipe.data.train, recipe.data.hub_split, tokenizer)
    if recipe.data.eval is None:
        return folder, rows, None
    return folder, rows, load_split(recipe.data, recipe.data.eval, recipe.data.hub_eval_split, tokenizer)


def _batches(recipe: Recipe, rows: TokenDataset, group: Group) -> BatchSampler:
    settings = recipe.train
    micro_batch_size = settings.micro_batch_size or min(8, settings.batch_size)
    return BatchSampler(
        rows, settings.batch_size, micro_batch_size, recipe.data.packing, settings.seed, group.rank, group.size
    )


def _prepare_engine(job: Job, read: FillParameter | None) -> None:
    settings = job.recipe.train
    if settings.activation_checkpointing == "layers":
        checkpoint_layers(job.model, on_host=settings.activation_offload)
    optimizer = partial(
        build_optimizer, name=settings.optimizer, betas=(settings.beta1, settings.beta2), epsilon=settings.epsilon,
        weight_decay=settings.weight_decay, ratio=settings.loraplus_lr_ratio,
    )  # fmt: skip
    rate = partial(
        learning_rate, peak=settings.learning_rate, schedule=settings.schedule, total_steps=job.total_steps,
        warmup_steps=count_warmup_steps(job.recipe, job.total_steps),
    )  # fmt: skip
    scales_loss = job.dtype.dtype is torch.float16
    job.engine.prepare(
        job.model, optimizer, StepSettings(settings.seed, settings.max_grad_norm, rate, scales_loss), read
    )
