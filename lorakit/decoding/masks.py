"""Which positions each new token of each row attends to, for a batch whose rows have different numbers of tokens."""

from typing import Any

import torch
from torch import Tensor, nn

from lorakit.base.layers import FULL, SLIDING, other_layer_kinds
from lorakit.errors import BaseModelError


def attention_masks(model: nn.Module, positions: Tensor) -> Any:
    """Return the mask of a forward, or for layers of several kinds a mask by kind, as transformers' models take them.

    positions: of the new tokens, (rows, new tokens). A mask is (rows, 1, new tokens, stored positions).
    """
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or [SLIDING if window else FULL])
    own = positions[:, :, None]
    stored = torch.arange(int(positions.max()) + 1, device=positions.device)
    causal = stored <= own
    masks = {kind: causal if kind == FULL or window is None else causal & (stored > own - window) for kind in kinds}
    if config._attn_implementation != "sdpa":  # eager attention adds the mask to the scores
        dtype = next(model.parameters()).dtype
        masks = {
            kind: torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
            for kind, mask in masks.items()
        }
    by_kind = {kind: mask[:, None] for kind, mask in masks.items()}
    return by_kind if len(by_kind) > 1 else next(iter(by_kind.values()))


def check_layer_kinds(model: nn.Module) -> None:
    """Raise BaseModelError unless every layer of a model has full or sliding attention.

    Slots have no room for other states, such as those of a state-space layer.
    """
    if others := other_layer_kinds(model):
        raise BaseModelError(
            f"base: {type(model).__name__} has layers of the kind {', '.join(others)}; serving keeps keys and values of"
            f" {FULL} and {SLIDING} layers alone. `lorakit generate` answers with this base"
        )
