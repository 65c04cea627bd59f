"""Does this model keep packed rows apart? Asked of the model itself before training, because some do not."""

from dataclasses import replace

import torch
from torch import nn

from lorakit.data import Batches, collate
from lorakit.errors import RunError

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


def check_isolation(model: nn.Module, batches: Batches, device: torch.device) -> None:
    """Passes when two rows packed together give the outputs they give alone.

    Raises:
        RunError: they do not; packing would train on a mixture of rows.
    """
    chosen = [0, 1] if len(batches.rows) > 1 else [0, 0]
    each = [collate(batches.rows, [row], packing=True) for row in chosen]
    parts = [
        replace(b, input_ids=b.input_ids[:, :MAX_TOKENS], position_ids=b.position_ids[:, :MAX_TOKENS]) for b in each
    ]
    ids = [part.input_ids.to(device) for part in parts]
    positions = [part.position_ids.to(device) for part in parts]
    was_training = model.training
    try:
        with torch.no_grad():
            model.eval()
            alone = [
                model(input_ids=i, position_ids=p, use_cache=False).logits for i, p in zip(ids, positions, strict=True)
            ]
            packed = model(input_ids=torch.cat(ids, 1), position_ids=torch.cat(positions, 1), use_cache=False).logits
    except TypeError as problem:
        raise RunError(
            f"data.packing: {type(model).__name__} takes no position_ids ({problem}); set data.packing: false"
        ) from None
    finally:
        model.train(was_training)
    expected = torch.cat(alone, 1)
    off = float((packed - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
    if not off <= TOLERANCE.get(expected.dtype, 3e-2):
        raise RunError(
            f"data.packing: {type(model).__name__} lets packed rows see each other (outputs differ by {off:.1%});"
            " set data.packing: false"
        )
