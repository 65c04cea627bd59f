"""Does this model keep packed rows apart, and is its loss what we take it for? Asked of the model itself."""

import inspect
import math
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorakit.data import BatchSampler, collate
from lorakit.data.batch import IGNORE_INDEX
from lorakit.errors import RunError
from lorakit.objectives.cross_entropy import LossModel
from lorakit.ops.packed_attention import RowLengths, disable_packed_attention, enable_packed_attention
from lorakit.ops.varlen import KernelProbe, varlen_kernel
from lorakit.parallel import Group

MAX_TOKENS = 64
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


def check_positions(model: nn.Module, max_tokens: int) -> None:
    """Passes when a row's positions are encoded the same whatever rows are beside it or came before.

    Raises:
        RunError: rotary positions that stretch with the longest row of a batch.
    """
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    told = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for rope in [told, *(part for part in told.values() if isinstance(part, dict))]:
        kind = rope.get("rope_type", rope.get("type"))
        limit = rope.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", 0)
        if kind in ("dynamic", "longrope") and max_tokens > int(limit or 0):
            raise RunError(
                f"data.max_tokens: {kind} positions of this base change for rows longer than {limit}, and then a row's"
                f" loss depends on its batch-mates; set it to {limit} or less, got {max_tokens}"
            )


def enable_packing(called: LossModel, batches: BatchSampler, device: torch.device) -> None:
    """Make packed rows give the outputs they give alone.

    Their attention goes row by row where the model allows it, in one call where a kernel gives the same. Elsewhere it
    is left to transformers to keep them apart with a mask over the whole line, whose memory grows with the square of
    its tokens.

    Raises:
        RunError: rows see each other all the same; packing would train on a mixture of them.
    """
    model = called.model
    probe = _probe(batches, device)
    was_training = called.training
    try:
        called.eval()
        alone = torch.cat([_logits(called, [row]) for row in probe], 1)
        if _takes_rows(model) and enable_packed_attention(model):
            called.by_row = True
            if _by_row(called, probe, alone, device):
                return
            called.by_row = False
            disable_packed_attention(model)
        off = _difference(_logits(called, probe), alone)
    except TypeError as problem:
        raise RunError(
            f"data.packing: {type(model).__name__} takes no position_ids ({problem}); set data.packing: false"
        ) from None
    finally:
        called.train(was_training)
    if not off <= _tolerance(alone):
        raise RunError(
            f"data.packing: {type(model).__name__} lets packed rows see each other (outputs differ by {off:.1%});"
            " set data.packing: false"
        )


def _by_row(called: LossModel, probe: list[dict[str, Tensor]], alone: Tensor, device: torch.device) -> bool:
    """Whether rows that attend row by row give what they give alone; if so, whether they may in one call is found."""
    rows = RowLengths([row["input_ids"].shape[1] for row in probe])
    kernel = varlen_kernel(device)
    trial = called.kernel = None if kernel is None else KernelProbe(kernel)
    good = _difference(_logits(called, probe, row_lengths=rows), alone) <= _tolerance(alone) and rows.was_used
    called.kernel = None
    if good and trial is not None:  # asked on every rank alike, also where the trial failed: engines gather
        called.kernel = kernel if trial.problem is None else None
        off = _difference(_logits(called, probe, row_lengths=rows), alone)
        if not off <= _tolerance(alone):
            called.kernel, trial.problem = None, f"is off by {off:.1%} on this model"
        called.kernel_problem = trial.problem
    return good


def verify_shortcuts(called: LossModel, batches: BatchSampler, device: torch.device, group: Group) -> None:
    """Keep of the loss in chunks and of leaving out tokens what gives the loss of the model's own logits."""
    ways = dict.fromkeys(product((called.chunked, False), (called.leaves_out, False)))
    for called.chunked, called.leaves_out in ways:
        plain = not called.chunked and not called.leaves_out
        if plain or not group.any(not loss_matches_logits(called, batches, device)):
            return


def loss_matches_logits(called: LossModel, batches: BatchSampler, device: torch.device) -> bool:
    """Whether the loss of every other token is that of the model's own logits.

    What is left out is no number meanwhile, so that a loss in which it has any part is none either.
    """
    good = True
    was_training = called.training
    called.eval()
    for row in _probe(batches, device):
        ids = row["input_ids"]
        labels = ids.roll(-1, 1)
        labels[:, 1::2] = IGNORE_INDEX
        places = torch.arange(0, ids.shape[1], 2, device=device)
        with torch.no_grad(), called.leaving_out(math.nan):
            found = float(called(input_ids=ids, labels=labels, label_positions=places))
            expected = float(F.cross_entropy(called(input_ids=ids)[0].float(), labels[0], reduction="sum"))
        good = good and abs(found - expected) <= _tolerance(next(called.parameters())) * expected
    called.train(was_training)
    return good


def _takes_rows(model: nn.Module) -> bool:
    """Whether a model's forward has room for the lengths of rows."""
    taken = inspect.signature(model.forward).parameters.values()
    return any(one.kind is one.VAR_KEYWORD or one.name == "row_lengths" for one in taken)


def _probe(batches: BatchSampler, device: torch.device) -> list[dict[str, Tensor]]:
    """The beginnings of two rows."""
    chosen = [0, 1] if len(batches.rows) > 1 else [0, 0]
    made = [collate(batches.rows, [row], packing=True).to(device) for row in chosen]
    return [{"input_ids": b.input_ids[:, :MAX_TOKENS], "position_ids": b.position_ids[:, :MAX_TOKENS]} for b in made]


@torch.no_grad()
def _logits(called: LossModel, rows: list[dict[str, Tensor]], **more: Any) -> Tensor:
    """Of rows packed into one line."""
    found: Tensor = called(**{key: torch.cat([row[key] for row in rows], 1) for key in rows[0]}, **more)
    return found


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6))


def _tolerance(like: Tensor) -> float:
    return TOLERANCE.get(like.dtype, 3e-2)
