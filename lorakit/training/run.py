"""Open a run: read its rows, load its base, put the adapter on, prepare the engine.

Invariant: a run is ready for its first step, and nothing was written to open it except the token cache.
"""

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lorakit.base.device import DtypeChoice, choose_dtype, training_products
from lorakit.base.find import find_base, find_tokenizer
from lorakit.base.from_recipe import adapter_spec, load_recipe_tokenizer, recipe_template
from lorakit.base.layers import checkpoint_layers
from lorakit.base.loading import LoadedBase, load_for_training
from lorakit.base.quantized import quantization_facts
from lorakit.data.dataset import TokenDataset
from lorakit.data.load import check_sources, load_datasets
from lorakit.data.sampler import BatchSampler
from lorakit.files.base_files import open_base_files
from lorakit.lora.inject import adapted_names
from lorakit.lora.own_head import own_head_of
from lorakit.lora.untrained import check_untrained
from lorakit.objectives.cross_entropy import LossModel
from lorakit.objectives.pairs import build_objective
from lorakit.ops.dropout import add_embedding_noise
from lorakit.ops.encoder_head import EncoderHead
from lorakit.ops.fuse import FuseReport, fuse_model
from lorakit.ops.products import Products, use_products
from lorakit.parallel import Engine, Group, StepSettings
from lorakit.parallel.adapter_state import build_optimizer
from lorakit.patch import BaseIdentity, Patch, fingerprint, unverified_note
from lorakit.patch.model import fill_adapter
from lorakit.patch.same_base import quantization_note
from lorakit.planning.skeleton import AttachedFacts, adapted_skeleton, attach_adapter
from lorakit.recipe import Recipe
from lorakit.recipe.schema import batch_sizes, count_steps
from lorakit.run.display import row_progress
from lorakit.run.start_from import Start, read_start, without_base_copies
from lorakit.training.answers import Answers, open_answers
from lorakit.training.callbacks import Hooks
from lorakit.training.checkpoint import Checkpoints, Progress, RunPatches, patch_facts
from lorakit.training.learning_rate import rate_of
from lorakit.training.model_checks import check_model
from lorakit.training.refusals import refuse_by_base, refuse_by_machine, refuse_by_rows
from lorakit.training.teacher import TEACHER, open_teacher


@dataclass(frozen=True)
class Inputs:
    """What a run reads besides its base's weights."""

    folder: Path
    datasets: dict[str, TokenDataset]  # `train`, and `eval` if rows are held out
    start: Start | None = None  # the patch that the run starts from
    patch: Patch | None = None  # its tensors; None without `start`, and where a checkpoint has newer ones


@dataclass
class Run:
    """One recipe's rows, adapter, checkpoints and progress."""

    recipe: Recipe
    inputs: Inputs
    engine: Engine
    dtype: DtypeChoice
    loss_model: LossModel
    adapter: AttachedFacts
    fused: FuseReport
    products: Products
    batches: dict[str, BatchSampler]  # of each of the data sets, this rank's rows
    patches: RunPatches
    checkpoints: Checkpoints
    total_steps: int  # of the full run, those before a resume included
    answers: Answers | None
    padded: str | None = None  # why rows are not packed, under `data.packing: auto`
    progress: Progress = field(default_factory=Progress)
    stopped: str | None = None  # why a callback stopped the run
    lost_lines: Mapping[str, Any] = field(default_factory=dict)  # by tracker, after the last step

    @property
    def output(self) -> Path:
        return Path(self.recipe.output)

    def facts(self) -> dict[str, Any]:
        rows = self.answers.rows if self.answers else None
        of_patches = self.patches.facts
        return {
            "data": data_facts(self.inputs.datasets),
            "base": {"model": self.recipe.base.model, "architecture": self.adapter.architecture, **of_patches["base"]},
            "dtype": self.dtype.name,
            "dtype_why": self.dtype.why,
            "total_steps": self.total_steps,
            "fused": asdict(self.fused)["parts"],
            "products": self.products,
            **({"shares_prompts": True} if self.batches["train"].shares_prompts else {}),
            **{key: of_patches[key] for key in ("start", "own_objective", TEACHER) if key in of_patches},
            **({"answers": {"rows": len(rows.rows), "left_out": len(rows.problems)}} if rows else {}),
        }


def read_inputs(recipe: Recipe, group: Group, recorded: Mapping[str, Any], start: Start | None) -> Inputs:
    """Find the base, tokenise the rows and read the patch that the run starts from. Collective.

    recorded: the run record of an interrupted run, whose date a chat template writes once more; else empty.
    Raises LorakitError: one of them is unusable, or differs between ranks.
    """
    group.run_on_rank_0(lambda: refuse_by_machine(recipe))
    saved = Checkpoints(Path(recipe.output) / "checkpoints")
    has_checkpoint = group.run_on_rank_0(lambda: "starts" in recorded and saved.newest() is not None)
    patch = None
    if start is not None and not has_checkpoint:
        if group.size > 1:  # one process of a machine caches the base's digests for the others
            group.run_once_per_machine(lambda: read_start(start, recipe) is None)
        patch = group.run_on_all(lambda: read_start(start, recipe))
    today = recorded.get("data", {}).get("train", {}).get("today")

    def load() -> tuple[Path, dict[str, TokenDataset]]:
        check_sources(recipe)
        folder = find_base(recipe.base.model, recipe.base.revision)
        refuse_by_base(recipe, adapted_skeleton(folder, recipe))
        return folder, load_datasets(recipe, load_recipe_tokenizer(recipe, folder), row_progress, today)

    folder, datasets = group.run_once_per_machine(load)  # the other processes of a machine map the token cache
    return Inputs(folder, datasets, start, patch)


def open_run(engine: Engine, recipe: Recipe, inputs: Inputs, recorded: Mapping[str, Any], hooks: Hooks) -> Run:
    """Load the base, put the recipe's adapter on it, and prepare the engine for its first step. Collective.

    recorded: the record of an interrupted run, whose dtype and products are used once more; else empty.
    Raises LorakitError: the base cannot be loaded, targets or rows do not fit it, or something differs between ranks.
    """
    group = engine.group
    # both are measured, so one rank chooses for all
    dtype, products = group.run_on_rank_0(lambda: _choose_arithmetic(recipe, engine.device, recorded))
    teacher_facts, teacher_tables = open_teacher(recipe, inputs.datasets, engine, recorded)
    engine.set_phase("loading the base")
    base = group.run_on_all(
        lambda: load_for_training(recipe.base, inputs.folder, dtype.dtype, engine.device, sharded=engine.shards_base)
    )
    adapter, fused = group.run_on_all(lambda: adapt_base(base, recipe, inputs))
    model = base.model
    identity = group.run_once_per_machine(lambda: _identity(recipe, inputs.folder, model))
    digests = {f"{name} rows": dataset.digest for name, dataset in inputs.datasets.items()}
    group.check_same("base and rows", {"base": identity, **digests})
    facts = patch_facts(recipe, identity, data_facts(inputs.datasets), inputs.start.facts() if inputs.start else None)
    facts |= {"own_objective": True} if hooks.objective is not None else {}
    facts |= teacher_facts
    facts |= {"quantization": adapter.quantization} if adapter.quantization else {}  # that of experts too
    if isinstance(head := own_head_of(model), EncoderHead):
        head.separate(load_recipe_tokenizer(recipe, inputs.folder))
    # a copy where a pipeline's stage will have some of the layers alone; the base is on meta there
    patches = RunPatches(recipe, copy.deepcopy(model) if engine.mesh.pipeline.size > 1 else model, facts)
    objective = hooks.objective or build_objective(recipe.objective.name, recipe.objective.settings)
    settings = recipe.train
    batch_size, micro_batch_size = batch_sizes(recipe)
    batches_of = partial(
        BatchSampler,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        packing=bool(recipe.data.packing),
        seed=settings.seed,
        rank=engine.mesh.data.rank,  # among those with other rows
        num_ranks=engine.mesh.data.size,
        group_size=objective.group_size,
    )
    rows = inputs.datasets["train"]
    run = Run(
        recipe=recipe,
        inputs=inputs,
        engine=engine,
        dtype=dtype,
        loss_model=LossModel(model, objective, label_smoothing=settings.label_smoothing),
        adapter=adapter,
        fused=fused,
        products=products,
        batches={name: batches_of(each, teacher=teacher_tables.get(name)) for name, each in inputs.datasets.items()},
        patches=patches,
        checkpoints=Checkpoints(Path(recipe.output) / "checkpoints"),
        total_steps=count_steps(recipe, rows.rows_per_epoch),
        answers=group.run_on_all(lambda: open_answers(recipe, inputs.folder, model, hooks)),
    )
    if settings.activation_checkpointing == "layers":
        checkpoint_layers(model, offload=settings.activation_offload)
    step_settings = StepSettings(
        settings.seed,
        settings.max_grad_norm,
        rate_of(recipe, run.total_steps),
        scales_loss=dtype.dtype is torch.float16,
        label_share=rows.counts.label_tokens / rows.counts.tokens,
    )
    use_products(run.loss_model, run.products)
    engine.prepare(run.loss_model, partial(build_optimizer, settings), step_settings, base.weights)
    check_model(run, base.weights)
    return run


def _choose_arithmetic(
    recipe: Recipe, device: torch.device, recorded: Mapping[str, Any]
) -> tuple[DtypeChoice, Products]:
    """Choose the dtype and the products of a run; one that goes on has those of its start, and so the same bits."""
    dtype = choose_dtype(recorded.get("dtype", recipe.base.dtype), device)
    if "dtype" not in recorded:
        return dtype, training_products(dtype.dtype, device)
    products: Products = "onednn" if recorded.get("products") == "onednn" else "torch"  # an older run has none
    return DtypeChoice(dtype.dtype, recorded["dtype_why"]), products


def adapt_base(base: LoadedBase, recipe: Recipe, inputs: Inputs) -> tuple[AttachedFacts, FuseReport]:
    """Put a recipe's adapter on its base, which may be on meta: untrained, or with the values of `inputs.patch`.

    Returns also the parts that run fused.
    Raises BaseModelError: the base's vocabulary is smaller than the tokenizer's. TargetError: a target matches no
    layer, or a trainable token occurs in no row.
    """
    model = base.model
    patch = inputs.patch
    spec = adapter_spec(recipe, inputs.folder)
    refuse_by_rows(recipe, model, spec, inputs.datasets)
    facts = attach_adapter(model, spec, base.dropout, recipe.train.seed, base.read_weight)
    notes = facts.notes
    check_untrained(model)  # on the backends that do not shard the base, whose layers have no values yet
    if patch is not None:
        fill_adapter(model, without_base_copies(patch, model, open_base_files(inputs.folder)))
        start_notes = [unverified_note(patch, recipe.base.model), quantization_note(patch, quantization_facts(model))]
        notes += tuple(note.removeprefix("note: ") for note in start_notes if note is not None)
    if recipe.train.neftune_alpha is not None:
        add_embedding_noise(model, recipe.train.neftune_alpha)
    return replace(facts, notes=notes), fuse_model(model)


def _identity(recipe: Recipe, folder: Path, model: nn.Module) -> dict[str, Any]:
    """Return the fingerprint of the base's adapted weights, and its quantisation. Reads them all, so once a machine."""
    tokenizer = find_tokenizer(recipe.base.tokenizer, folder)
    base = BaseIdentity(open_base_files(folder), tokenizer, recipe_template(recipe))
    identity = fingerprint(base, adapted_names(model))
    quantization = quantization_facts(model)
    return identity if quantization is None else identity | {"quantized": quantization}


def data_facts(datasets: Mapping[str, TokenDataset]) -> dict[str, Any]:
    return {name: {"sources": r.sources, "digest": r.digest, **asdict(r.counts)} for name, r in datasets.items()}
