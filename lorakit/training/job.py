"""Assemble a training run: engine, base with its adapter, rows, optimizer.

Invariant: a Job is ready for its first step, and nothing was written to assemble it except the token cache.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from lorakit.base.adapter_spec import adapter_spec
from lorakit.base.dropout import dropout_notes
from lorakit.base.dtype import DtypeChoice, choose_dtype
from lorakit.base.find import find_base, find_tokenizer
from lorakit.base.layers import checkpoint_layers
from lorakit.base.load import load_recipe_tokenizer, recipe_template, vocabulary_size
from lorakit.base.loading import LoadedBase, load_for_training
from lorakit.base.meta import split_parameters
from lorakit.base.quantized import count_parameters, quantization_facts
from lorakit.base.skeleton import adapted_skeleton
from lorakit.base.start_patch import FIXED, Start, fill_adapter, find_start, read_start
from lorakit.data import BatchSampler, TokenDataset
from lorakit.data.dataset import count_shared
from lorakit.data.load import check_sources, eval_sets, load_rows, resolve_shared_rows, training_sets
from lorakit.errors import BaseModelError, TargetError
from lorakit.files.base_files import open_base_files
from lorakit.inference.bind import quantization_note
from lorakit.lora import AdapterSpec, adapted_names, adapter_tensors, attach, find_targets
from lorakit.lora.coverage import Coverage, adapter_notes, coverage_of
from lorakit.lora.extra_targets import find_extra_targets
from lorakit.lora.untrained import check_untrained
from lorakit.objectives.cross_entropy import LossModel
from lorakit.objectives.objective import OBJECTIVES
from lorakit.ops.dropout import add_embedding_noise
from lorakit.ops.fuse import FuseReport, fuse_model
from lorakit.parallel import Engine, Group, StepSettings
from lorakit.parallel.axes import check_axes
from lorakit.parallel.pipeline.axis import structure_of
from lorakit.patch import BaseIdentity, Patch, fingerprint, unverified_note
from lorakit.quant.bnb import check_optimizer
from lorakit.recipe import AdapterSection, Recipe
from lorakit.recipe.schema import count_steps
from lorakit.run.display import row_progress
from lorakit.run.record import recorded_run
from lorakit.training.answers import Answers, open_answers
from lorakit.training.callbacks import NO_HOOKS, Hooks
from lorakit.training.checkpoint import Checkpoints, check_disk
from lorakit.training.compile import CompiledLayers
from lorakit.training.model_checks import (
    check_causal,
    check_positions,
    check_row_lengths,
    check_sequence,
    check_stages,
    enable_packing,
    verify_chunked_loss,
)
from lorakit.training.run_patches import RunPatches, patch_facts
from lorakit.training.updates import optimizer_of, rate_of

NOT_FUSED: Final = "none: train.compile lets torch fuse operations itself"


@dataclass(frozen=True)
class AdaptedBase:
    """A base with an untrained adapter on it.

    coverage: share of the base's products that the adapter changes. notes: sentences for the user about a small share,
    a large rank, or the base's own dropout. num_parameters: of the base. fused: the parts that run fused; None under
    train.compile.
    """

    base: LoadedBase
    coverage: Coverage
    notes: tuple[str, ...]
    num_parameters: int
    num_trainable: int
    fused: FuseReport | None


@dataclass(frozen=True)
class Job:
    """All parts of a run.

    batches, eval_batches: this rank's rows; None if there are no held-out rows. total_steps: optimizer updates of the
    full run, those before a resume included. start: the patch that the adapter started from; None if it was untrained.
    compiled: None unless train.compile is set. own_objective: the caller gave it, instead of the recipe.
    answers: None without train.eval_generate.
    """

    recipe: Recipe
    output: Path
    loss_model: LossModel
    engine: Engine
    dtype: DtypeChoice
    adapted: AdaptedBase
    batches: BatchSampler
    eval_batches: BatchSampler | None
    base_fingerprint: dict[str, Any]
    patches: RunPatches
    checkpoints: Checkpoints
    total_steps: int
    architecture: str
    start: Start | None = None
    compiled: CompiledLayers | None = None
    own_objective: bool = False
    answers: Answers | None = None

    def data_facts(self) -> dict[str, Any]:
        """Return sources, digest and counts of the training and held-out rows, for records."""
        return data_facts(self.batches.rows, self.eval_batches.rows if self.eval_batches else None)

    def base_facts(self) -> dict[str, Any]:
        """Return name, architecture and fingerprint of the base, for records."""
        return {"model": self.recipe.base.model, "architecture": self.architecture, **self.base_fingerprint}


def data_facts(rows: TokenDataset, eval_rows: TokenDataset | None) -> dict[str, Any]:
    """Return sources, digest and counts of the training rows and of held-out rows, if there are any, for records."""
    sets = {"train": rows} | ({"eval": eval_rows} if eval_rows else {})
    return {name: {"sources": r.sources, "digest": r.digest, **asdict(r.counts)} for name, r in sets.items()}


def build_job(
    recipe: Recipe, engine: Engine, recorded: Mapping[str, Any], start: Start | None = None, hooks: Hooks = NO_HOOKS
) -> Job:
    """Load and connect all parts of a run. Collective.

    recorded: the run record of an interrupted run, whose choice of dtype is used once more; else empty. start: the
    patch that the run starts from, read unless a checkpoint has the adapter. hooks: the caller's functions.

    Raises:
        LorakitError: base, rows or targets are unusable, or differ between ranks.
    """
    group, output = engine.group, Path(recipe.output)
    saved = Checkpoints(output / "checkpoints", recipe.train.keep_checkpoints)
    has_checkpoint = group.run_on_rank_0(lambda: "starts" in recorded and saved.newest() is not None)
    patch = None if start is None or has_checkpoint else group.run_on_all(lambda: read_start(start, recipe))
    folder, rows, eval_rows = group.run_once_per_machine(lambda: load_data(recipe, recorded))
    # `auto` measures the machine, so one rank chooses for all
    dtype = group.run_on_rank_0(lambda: choose_dtype(recorded.get("dtype", recipe.base.dtype), engine.device))
    if "dtype" in recorded:
        dtype = DtypeChoice(dtype.dtype, recorded["dtype_why"])
    engine.set_phase("loading the base")
    adapted = group.run_on_all(lambda: load_adapted_base(recipe, engine, folder, dtype.dtype, rows, eval_rows, patch))
    model = adapted.base.model
    group.run_on_rank_0(lambda: check_disk(recipe, rows.rows_per_epoch, adapted.num_trainable))
    identity = group.run_once_per_machine(lambda: _identity(recipe, folder, model))
    digests = {"rows": rows.digest, "held-out rows": eval_rows.digest if eval_rows else None}
    group.check_same("base and rows", {"base": identity, **digests})
    facts = patch_facts(recipe, identity, data_facts(rows, eval_rows), start.facts() if start else None)
    if (template := recipe_template(recipe)) is not None:
        facts["chat_template"] = template
    if hooks.objective is not None:
        facts["own_objective"] = True
    # a pipeline's stage has some of the layers alone
    patches = RunPatches(recipe, structure_of(model) if engine.mesh.pipeline.size > 1 else model, facts)
    job = Job(
        recipe=recipe,
        output=output,
        loss_model=LossModel(
            model,
            hooks.objective or OBJECTIVES[recipe.objective.name],
            label_smoothing=recipe.train.label_smoothing,
        ),
        engine=engine,
        dtype=dtype,
        adapted=adapted,
        batches=_batches(recipe, rows, engine.mesh.data),
        eval_batches=_batches(recipe, eval_rows, engine.mesh.data) if eval_rows else None,
        base_fingerprint=identity,
        patches=patches,
        checkpoints=Checkpoints(output / "checkpoints", recipe.train.keep_checkpoints, patches),
        total_steps=count_steps(recipe, rows.rows_per_epoch),
        architecture=type(model).__name__,
        start=start,
        own_objective=hooks.objective is not None,
        answers=group.run_on_all(lambda: open_answers(recipe, folder, model, hooks)),
    )
    _prepare_engine(job)
    # after the engine has filled the base, and before a step: what the checks choose is read in every forward
    if engine.mesh.pipeline.size > 1:
        check_stages(
            job.loss_model, job.batches, engine.device, engine.mesh,
            lambda: load_adapted_base(recipe, engine, folder, dtype.dtype, rows, eval_rows, patch).base,
        )  # fmt: skip
    check_causal(job.loss_model, job.batches, engine.device)
    verify_chunked_loss(job.loss_model, job.batches, engine.device, group)
    if recipe.data.packing:
        enable_packing(job.loss_model, job.batches, engine.device)
    if engine.mesh.sequence.size > 1:
        check_sequence(job.loss_model, job.batches, engine.device, engine.mesh)
    # last, so that the checks above do not compile
    return replace(job, compiled=CompiledLayers(model)) if recipe.train.compile else job


def choose_start(recipe: Recipe, *, fresh: bool) -> Start | None:
    """Return the patch that a run starts from; None without `adapter.start_from`.

    A run that goes on has its settings and digest in its record, so that the patch is read once.

    Raises:
        LorakitError: as `find_start`.
    """
    recorded = {} if fresh else recorded_run(Path(recipe.output))
    facts, section = recorded.get("start"), recorded.get("recipe", {}).get("adapter", {})
    if not facts or recipe.adapter.start_from is None or section.get("start_from") != recipe.adapter.start_from:
        return find_start(recipe)
    try:
        before = AdapterSection.model_validate_json(json.dumps(section))
        taken = {key: getattr(before, key) for key in FIXED if key not in recipe.adapter.model_fields_set}
        return Start(recipe.adapter.start_from, facts["digest"], taken, facts.get("step"))
    except (ValueError, KeyError, TypeError, AttributeError):  # a record that `open_record` refuses with a full message
        return find_start(recipe)


def load_data(recipe: Recipe, recorded: Mapping[str, Any]) -> tuple[Path, TokenDataset, TokenDataset | None]:
    """Return the base's folder, the tokenised training rows, and the held-out rows or None.

    Reads all rows, so one process of a machine does it; the others map the same files of the token cache. recorded: the
    run record of an interrupted run, whose date a chat template writes once more.
    """
    today = recorded.get("data", {}).get("train", {}).get("today")
    check_sources(recipe.data)
    folder = find_base(recipe.base.model, recipe.base.revision)
    check_without_rows(recipe, folder)
    tokenizer = load_recipe_tokenizer(recipe, folder)
    data = recipe.data
    rows = load_rows(data, training_sets(data), tokenizer, row_progress, today)
    eval_rows = load_rows(data, eval_sets(data), tokenizer, row_progress, today) if data.has_eval else None
    return folder, resolve_shared_rows(data, rows, eval_rows), eval_rows


def same_rows_note(rows: TokenDataset, eval_rows: TokenDataset | None = None) -> str | None:
    """Return a sentence if held-out rows are training rows; else None."""
    if eval_rows is None:
        return None
    if rows.digest == eval_rows.digest:
        return (
            "the held-out rows are the training rows, so their loss says nothing about new ones; name others in"
            " data.eval"
        )
    number = count_shared(rows, eval_rows)
    return f"{number:,} of {len(eval_rows):,} held-out rows are training rows too (the same tokens)" if number else None


def check_without_rows(recipe: Recipe, folder: Path) -> None:
    """Raise LorakitError unless adapter, axes and data.max_tokens fit the base, and the optimizer runs here.

    For use before rows are tokenised, which may take hours. Opens no weights.
    """
    check_optimizer(recipe.train.optimizer, on_gpu=torch.cuda.is_available())
    skeleton = adapted_skeleton(folder, recipe.base, recipe.adapter)
    check_axes(skeleton.model, skeleton.spec, recipe.parallel.axes)
    check_positions(skeleton.model, recipe.data.max_tokens)


def load_adapted_base(
    recipe: Recipe,
    engine: Engine,
    folder: Path,
    dtype: torch.dtype,
    rows: TokenDataset,
    eval_rows: TokenDataset | None,
    patch: Patch | None = None,
) -> AdaptedBase:
    """Load the base and put an adapter on it. The base stays on meta if the engine shards it.

    patch: the adapter's first values; None: it is untrained.

    Raises:
        BaseModelError: the base cannot be loaded, or its vocabulary is smaller than the tokenizer's.
        TargetError: a target matches no layer, or a trainable token occurs in no row.
    """
    base = load_for_training(recipe.base, folder, dtype, engine.device, sharded=engine.shards_base)
    model = base.model
    spec = adapter_spec(recipe.adapter, find_tokenizer(recipe.base.tokenizer, folder))
    for dataset in filter(None, (rows, eval_rows)):
        check_vocabulary(model, dataset, max(spec.new_tokens.values(), default=-1))
        check_row_lengths(model, dataset)
    if recipe.adapter.start_from is None:  # else the rows of tokens that do not occur stay as they are in the patch
        check_tokens_occur(spec, rows)
    targets = find_targets(model, spec)
    experts = find_extra_targets(model, spec, targets).experts
    # before `attach`, which adds parameters that are not the base's
    coverage = coverage_of(model, {target.name for target in targets} | {expert.name for expert in experts})
    num_parameters = count_parameters(model)
    start_notes = [] if patch is None else [unverified_note(patch, recipe.base.model), quantization_note(patch, model)]
    attach(model, targets, spec, recipe.train.seed, base.read_weight)
    check_untrained(model)  # on the backends that do not shard the base, whose layers have no values yet
    notes = [*dropout_notes(base.dropout), *adapter_notes(coverage, targets, spec)]
    notes += [note.removeprefix("note: ") for note in start_notes if note is not None]
    if patch is not None:
        fill_adapter(model, patch, folder)
    if recipe.train.neftune_alpha is not None:
        add_embedding_noise(model, recipe.train.neftune_alpha)
    fused = None if recipe.train.compile else fuse_model(model)  # because torch.compile fuses plain operations itself
    return AdaptedBase(base, coverage, tuple(notes), num_parameters, num_trainable(model), fused)


def num_trainable(model: nn.Module) -> int:
    """Return the number of values that an adapted model trains."""
    return sum(tensor.numel() for tensor in adapter_tensors(model).values())


def check_vocabulary(model: nn.Module, rows: TokenDataset, last_new_token: int = -1) -> None:
    """Return if every token of the rows has a row in the model's embedding, or will have one up to the last new token.

    Raises:
        BaseModelError: the tokenizer gave larger ids.
    """
    num_rows = max(vocabulary_size(model), last_new_token + 1)
    if rows.counts.largest_id >= num_rows:
        raise BaseModelError(
            f"the tokenizer gave the id {rows.counts.largest_id}, the base's embedding has {num_rows} rows;"
            " they do not belong together"
        )


def check_tokens_occur(spec: AdapterSpec, rows: TokenDataset) -> None:
    """Return if every trainable token and every new one occurs in the training rows.

    Raises:
        TargetError: some do not, so their embeddings would never get a gradient.
    """
    missing = {*spec.trainable_tokens, *spec.new_tokens.values()}
    for row in range(len(rows)):
        if not missing:
            return
        missing -= set(np.intersect1d(rows.ids(row), list(missing)).tolist())
    if missing:
        key = "trainable_tokens" if missing & set(spec.trainable_tokens) else "new_tokens"
        texts = {token: text for text, token in spec.new_tokens.items()}
        named = ", ".join(repr(texts.get(token, token)) for token in sorted(missing))
        raise TargetError(
            f"adapter.{key}: of {len(rows)} training rows none has {named}, so its row would not be trained;"
            " leave it out"
        )


def _identity(recipe: Recipe, folder: Path, model: nn.Module) -> dict[str, Any]:
    """Return the fingerprint of the base's adapted weights and how the base is quantised, for records and patches.

    Reads all adapted weights, so one process of a machine does it.
    """
    tokenizer = find_tokenizer(recipe.base.tokenizer, folder)
    base = BaseIdentity(open_base_files(folder), tokenizer, recipe_template(recipe), split_parameters(folder))
    identity = fingerprint(base, adapted_names(model))
    quantization = quantization_facts(model)
    return identity if quantization is None else identity | {"quantized": quantization}


def _batches(recipe: Recipe, rows: TokenDataset, data: Group) -> BatchSampler:
    """Return the sampler of this rank's rows. data: the ranks with other rows."""
    settings = recipe.train
    micro_batch_size = settings.micro_batch_size or min(8, settings.batch_size)
    return BatchSampler(
        rows, settings.batch_size, micro_batch_size, recipe.data.packing, settings.seed, data.rank, data.size
    )


def _prepare_engine(job: Job) -> None:
    """Give the engine the model, the optimizer's settings and the learning rate's schedule."""
    settings = job.recipe.train
    if settings.activation_checkpointing == "layers":
        checkpoint_layers(job.loss_model.model, offload=settings.activation_offload)
    scales_loss = job.dtype.dtype is torch.float16
    rate, counts = rate_of(job.recipe, job.total_steps), job.batches.rows.counts
    label_share = counts.label_tokens / counts.tokens
    step_settings = StepSettings(settings.seed, settings.max_grad_norm, rate, scales_loss, label_share)
    job.engine.prepare(job.loss_model, optimizer_of(job.recipe), step_settings, job.adapted.base.weights)
