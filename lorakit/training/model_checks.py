"""Check a model by running it: do tokens depend on later ones, do packed rows stay apart, is the chunked loss right?

Configs and class names are not trusted for any of it, because models differ in ways that these do not show.
"""

import copy
import inspect
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lorakit.base.layers import num_steady_positions, other_layer_kinds, repeated_layers
from lorakit.base.lazy import LazyBase
from lorakit.data.batch import IGNORE_INDEX
from lorakit.data.sampler import BatchSampler, collate
from lorakit.errors import BaseModelError, RunError
from lorakit.files.base_files import open_base_files
from lorakit.lora.untrained import explain_not_numbers, relative_difference, tolerance
from lorakit.objectives.cross_entropy import LossModel
from lorakit.ops.packed_attention import RowLengths, disable_packed_attention, enable_packed_attention, varlen_kernel
from lorakit.ops.row_by_row import call_row_by_row
from lorakit.parallel import Group
from lorakit.parallel.group import Mesh
from lorakit.parallel.sequence.axis import REMEDY
from lorakit.parallel.streaming import stream_layers
from lorakit.training.callbacks import restored_modes

if TYPE_CHECKING:  # that file imports this one
    from lorakit.training.run import Run

MAX_PROBE_TOKENS: Final = 64  # per row
CAUSAL_TOLERANCE: Final = {torch.float32: 1e-4}
"""relative; other dtypes 8e-3, twice their rounding. Attention to a later token moves random BERTs by 1.3e-2"""

Probe = list[dict[str, Tensor]]
"""token and position ids of two rows, each (1, tokens), with which a model is tried"""


def probe_rows(batches: BatchSampler, device: torch.device) -> Probe:
    """Return the first MAX_PROBE_TOKENS of two rows."""
    indices = [0, 1] if len(batches.rows) > 1 else [0, 0]
    rows = [collate(batches.rows, [index], packing=True).to(device) for index in indices]
    return [
        {"input_ids": row.input_ids[:, :MAX_PROBE_TOKENS], "position_ids": row.position_ids[:, :MAX_PROBE_TOKENS]}
        for row in rows
    ]


def check_model(run: "Run", weights: LazyBase | None) -> None:
    """Choose a run's loss and attention once the engine has filled the base. Collective. weights: of a base on meta."""
    engine = run.engine
    recipe = run.recipe
    probe = run.loss_model, probe_rows(run.batches["train"], engine.device)
    if engine.mesh.pipeline.size > 1:
        check_stages(*probe, engine.mesh, run.patches.model, weights)
    is_causal = check_causal(*probe, run.inputs.folder)
    verify_chunked_loss(*probe, engine.group)
    if recipe.data.packing:
        # a stage recomputes several lines in turn, and a part that is called row by row knows the last one
        by_rows = engine.mesh.pipeline.size == 1 and not engine.facts.counts_calls
        problem = enable_packing(*probe, by_rows=by_rows) if is_causal else "tokens of this base see later ones"
        if problem is not None and (recipe.data.packing != "auto" or engine.mesh.sequence.size > 1):
            raise RunError(f"data.packing: {problem}; set data.packing: auto")
        if problem is not None:
            run.padded = problem
            run.batches = {name: replace(each, packing=False) for name, each in run.batches.items()}
    if not run.batches["train"].packing:
        check_padding(*probe)
    elif _may_share_prompts(run) and can_share_prompts(*probe):
        run.batches = {name: replace(each, shares_prompts=True) for name, each in run.batches.items()}
    if engine.mesh.sequence.size > 1:
        check_sequence(*probe, engine.mesh)


def _may_share_prompts(run: "Run") -> bool:
    """True if rows of a group may be computed after one prompt: nothing in a layer depends on where a row lies."""
    recipe = run.recipe
    model = run.loss_model
    is_noisy = recipe.adapter.dropout > 0 or recipe.train.neftune_alpha is not None
    has_full_lines = run.engine.mesh.sequence.size == run.engine.mesh.pipeline.size == 1
    attends = model.packed_attention and model.kernel is None and not model.row_by_row
    is_steady = num_steady_positions(model.model.config) is None and not other_layer_kinds(model.model)
    # the texts of embeddings are compared by all of their tokens
    has_groups = run.batches["train"].rows_per_group > 1 and not model.objective.reads_states
    return has_groups and has_full_lines and attends and is_steady and not is_noisy


def check_causal(loss_model: LossModel, probe: Probe, folder: Path) -> bool:
    """Return whether no token's outputs depend on the next token. Those of embeddings may. Collective.

    folder: of the base. Raises RunError: the outputs are logits, and do, so the model would learn to copy.
    BaseModelError: they are not numbers.
    """
    # two tokens, because the later one's share of attention is largest then; a row has as many, or no label
    ids = probe[0]["input_ids"][:, :2]
    changed = torch.stack([ids[:, 0], (ids[:, 1] == 0).long()], 1)  # token 0, or 1 where it was 0
    before, after = (_logits(loss_model, [{"input_ids": tokens}])[:, 0] for tokens in (ids, changed))
    if not (before.isfinite().all() and after.isfinite().all()):
        files = open_base_files(folder)  # because a rank may have a part of the weights only
        weights = ((name, file.read(name)) for name, file in files.shard_of.items())
        raise BaseModelError(explain_not_numbers(weights, before.dtype))
    difference = relative_difference(after, before)
    if difference <= CAUSAL_TOLERANCE.get(before.dtype, 8e-3):
        return True
    if not loss_model.reads_states:
        raise RunError(
            f"base: {type(loss_model.model).__name__} is no causal language model: a token's logits change by"
            f" {100 * difference:.2g}% with the token after it, so it would learn to copy instead of to predict."
            " Choose another base (BERT and its relatives need is_decoder: true in config.json)"
        )
    return False


def enable_packing(loss_model: LossModel, probe: Probe, *, by_rows: bool = True) -> str | None:
    """Choose how packed rows are computed, such that each gives the outputs that it gives alone. Collective.

    First choice: attention within each row, in one kernel call if a kernel gives the same. Otherwise transformers masks
    the full line, whose memory grows with the square of its tokens. by_rows: parts of layers in which rows see each
    other all the same, such as states, are called row by row. Returns why rows cannot be packed; None if they can.
    """
    model = loss_model.model
    # without positions, because a model may count its own from another number than 0
    alone = torch.cat([_logits(loss_model, [{"input_ids": row["input_ids"]}]) for row in probe], 1)
    parameters = inspect.signature(model.forward).parameters.values()
    takes_lengths = any(each.kind is each.VAR_KEYWORD or each.name == "row_lengths" for each in parameters)
    can_pack_attention = takes_lengths and enable_packed_attention(model)
    for packs_attention in (True, False) if can_pack_attention else (False,):
        loss_model.packed_attention = packs_attention
        if can_pack_attention and not packs_attention:
            disable_packed_attention(model)
        try:
            if _packing_works(loss_model, probe, alone):
                return None
            if by_rows and _call_row_by_row(loss_model, probe) and _packing_works(loss_model, probe, alone):
                return None
        except (TypeError, AttributeError, RuntimeError) as problem:  # of a model that computes with its mask
            if isinstance(problem, torch.OutOfMemoryError):
                raise
            reason = f"takes no packed rows ({problem})"
        else:
            difference = relative_difference(_packed_logits(loss_model, probe), alone)
            reason = f"lets packed rows see each other (outputs differ by {100 * difference:.2g}%)"
    loss_model.row_by_row.clear()
    return f"{type(model).__name__} {reason}"


def can_share_prompts(loss_model: LossModel, probe: Probe) -> bool:
    """True if a row that begins as another does gives the outputs that it gives alone. Collective."""
    first, second = (row["input_ids"] for row in probe)
    shared = first.shape[1] // 2
    positions = torch.arange(shared, shared + second.shape[1], device=second.device)[None]
    line = [probe[0], {"input_ids": second, "position_ids": positions}]
    lengths = RowLengths([first.shape[1], second.shape[1]], shared=[0, shared])
    together = _logits(loss_model, line, row_lengths=lengths)
    alone = [_logits(loss_model, [{"input_ids": ids}]) for ids in (first, torch.cat([first[:, :shared], second], 1))]
    return relative_difference(together, torch.cat([alone[0], alone[1][:, shared:]], 1)) <= tolerance(together)


def check_padding(loss_model: LossModel, probe: Probe) -> None:
    """Raise RunError unless rows that are padded to one length give the outputs that they give alone. Collective."""
    rows = [row["input_ids"][0] for row in probe]
    padded, mask = (pad_sequence(parts, batch_first=True) for parts in (rows, list(map(torch.ones_like, rows))))
    together = _logits(loss_model, [{"input_ids": padded, "attention_mask": mask}])
    alone = [_logits(loss_model, [{"input_ids": ids[None]}])[0] for ids in rows]
    difference = max(relative_difference(one[: len(two)], two) for one, two in zip(together, alone, strict=True))
    if difference > tolerance(together):
        raise RunError(f"base: a padded row gets other outputs than alone (off by {100 * difference:.2g}%)")


def _call_row_by_row(loss_model: LossModel, probe: Probe) -> bool:
    """Have parts of layers in which rows see each other called row by row; False if there are none."""
    parts = [part for layer in repeated_layers(loss_model.model) for part in layer.children()]
    leaking = call_row_by_row(parts, lambda: _packed_logits(loss_model, probe), loss_model.line_lengths)
    loss_model.row_by_row += leaking
    return bool(leaking)


def _packed_logits(loss_model: LossModel, probe: Probe) -> Tensor:
    return _logits(loss_model, probe, row_lengths=RowLengths([row["input_ids"].shape[1] for row in probe]))


def _packing_works(loss_model: LossModel, probe: Probe, alone: Tensor) -> bool:
    """True if packed rows give the logits `alone`; where attention knows them, in one kernel call if a kernel does."""
    rows = RowLengths([row["input_ids"].shape[1] for row in probe])
    works = relative_difference(_logits(loss_model, probe, row_lengths=rows), alone) <= tolerance(alone)
    works = works and (rows.was_used or not loss_model.packed_attention)
    kernel = varlen_kernel(alone.device) if loss_model.packed_attention else None
    if kernel is None:
        return works
    loss_model.kernel = kernel  # on every rank, also where rows do not work: forward is collective for a sharded base
    difference = relative_difference(_packed_logits(loss_model, probe), alone)
    if works and kernel.num_calls == 0:
        loss_model.kernel_problem = "does not take this model's attention, or its dtype"
    elif works and difference > tolerance(alone):
        loss_model.kernel_problem = f"is off by {100 * difference:.2g}% on this model"
    if not works or loss_model.kernel_problem is not None:
        loss_model.kernel = None
    return works


def check_sequence(loss_model: LossModel, probe: Probe, mesh: Mesh) -> None:
    """Raise RunError unless a line cut over ranks gives the full line's logits: tokens meet in attention alone."""
    model = loss_model.model
    sequence = mesh.sequence
    if not loss_model.packed_attention:
        raise RunError(f"parallel.sequence: {type(model).__name__} has an attention of its own, {REMEDY}")
    rows = probe * sequence.size  # so that every rank has tokens
    lengths = [row["input_ids"].shape[1] for row in rows]
    own = sequence.part(sum(lengths))
    part = {key: torch.cat([row[key] for row in rows], 1)[:, own.start : own.stop] for key in rows[0]}
    full = _logits(loss_model, rows, row_lengths=RowLengths(lengths))[:, own.start : own.stop]
    difference = relative_difference(_logits(loss_model, [part], row_lengths=RowLengths(lengths)), full)
    if mesh.replicas.any(difference > tolerance(full)):
        raise RunError(
            f"parallel.sequence: {type(model).__name__} gives other outputs where ranks share a line (off by"
            f" {100 * difference:.2g}% here); its tokens meet outside of attention. Leave it out"
        )


def check_stages(loss_model: LossModel, probe: Probe, mesh: Mesh, full: nn.Module, weights: LazyBase | None) -> None:
    """Raise RunError unless a pipeline's stages give the logits of the full model, which is on meta."""
    model = loss_model.model
    row = probe[:1]
    try:
        actual = _logits(loss_model, row)
    except (TypeError, AttributeError, KeyError, IndexError, AssertionError, ValueError) as problem:
        raise RunError(
            f"parallel.pipeline: {type(model).__name__} cannot be called in stages ({type(problem).__name__}:"
            f" {str(problem)[:200]}); leave it out"
        ) from problem
    difference = 0.0
    if mesh.pipeline.rank == mesh.pipeline.size - 1 and mesh.replicas.rank == 0:
        assert weights is not None
        streamed = LossModel(copy.deepcopy(full)).eval()
        stream_layers(streamed, weights, actual.device)
        difference = relative_difference(actual, _logits(streamed, row))
    if mesh.pipeline.any(difference > tolerance(actual)):
        raise RunError(
            f"parallel.pipeline: the stages of {type(model).__name__} give other outputs than the full model (off by"
            f" {100 * difference:.2g}% here); something besides hidden states goes from layer to layer. Leave it out"
        )


def verify_chunked_loss(loss_model: LossModel, probe: Probe, group: Group) -> None:
    """Turn off the chunked loss if it differs from the loss of the model's own logits. Every rank decides alike."""
    loss_model.chunked = loss_model.chunked and not group.any(not loss_matches_logits(loss_model, probe))


def loss_matches_logits(loss_model: LossModel, probe: Probe) -> bool:
    """True if the loss of every second token of two rows equals cross-entropy over the model's own logits."""
    matches = True
    with restored_modes(loss_model), torch.no_grad():
        loss_model.eval()
        for row in probe:
            ids = row["input_ids"]
            labels = ids.roll(-1, 1)
            labels[:, 1::2] = IGNORE_INDEX
            positions = torch.arange(0, ids.shape[1], 2, device=ids.device)
            try:
                loss = float(loss_model(input_ids=ids, labels=labels, label_positions=positions)[0].sum())
            except RuntimeError:  # the head takes another width, because something is computed before it
                loss = math.nan
            expected = float(F.cross_entropy(loss_model(input_ids=ids)[0].float(), labels[0], reduction="sum"))
            # no early return: forward is collective where the base is sharded
            matches = matches and abs(loss - expected) <= tolerance(next(loss_model.parameters())) * expected
    return matches


@torch.no_grad()
def _logits(loss_model: LossModel, rows: Probe, **inputs: Any) -> Tensor:
    """Return the logits of rows packed into one line, (1, tokens of all rows, vocabulary), without dropout."""
    line = {key: torch.cat([row[key] for row in rows], 1) for key in rows[0]}
    with restored_modes(loss_model):
        logits: Tensor = loss_model.eval()(**line, **inputs)
    return logits
