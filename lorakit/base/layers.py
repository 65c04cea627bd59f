"""The repeated layers of a model: listed, grouped for sharding, and recomputed in backward; and its positions."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import noop_context_fn

from lorakit.errors import RunError

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
STRETCHED: Final = ("linear", "yarn", "dynamic", "longrope", "ntk")
"""kinds of rotary positions that reach ``factor`` times as far as those the base was first trained with"""
AFTER_PADDING: Final = (
    "camembert", "data2vec-text", "ibert", "longformer", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta",
    "xlm-roberta-xl", "xmod",
)  # fmt: skip
"""model types whose positions are counted from the padding token's id on, as fairseq does"""
VARYING: Final = ("dynamic", "longrope")  # those whose frequencies depend on the longest row of a forward


def repeated_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of every list of layers, without those whose tensors another process has."""
    for layers in layer_lists(model):
        yield from (layer for layer in layers if next(layer.parameters(), None) is not None)


def layer_lists(model: nn.Module) -> Iterator[nn.ModuleList]:
    """Yield every ModuleList of several layers, outside of such layers: an expert in a layer is no layer of its own."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    inner = {module for layers in lists for layer in layers for module in layer.modules()}
    yield from (layers for layers in lists if layers not in inner)


def gather_groups(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules whose shards an engine gathers together: each repeated layer, and an untied embedding."""
    yield from repeated_layers(model)
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    # a tied embedding is in no group, because the output head reads it when the embedding's shards are freed already
    weight = getattr(embedding, "weight", None)  # None: another process has the embedding
    if sum(parameter is weight for _, parameter in model.named_parameters(remove_duplicate=False)) == 1:
        yield embedding


def other_layer_kinds(model: nn.Module) -> list[str]:
    """Return the kinds of a model's layers besides full and sliding attention, such as those with a state."""
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    own = getattr(config, "attention_layers", None)  # of GPT-Neo, whose "local" ones count from the cache's end
    return sorted({*(getattr(config, "layer_types", None) or ()), *(own or ())} - {FULL, SLIDING, "global"})


def checkpoint_layers(
    model: nn.Module, *, offload: bool = False, context_fn: Callable[[], tuple[Any, Any]] = noop_context_fn
) -> None:
    """Save only the input of each layer in forward, and recompute the layer in backward. Raises RunError: it cannot.

    ``offload``: save the inputs in host memory. ``context_fn``: as for ``torch.utils.checkpoint``.
    """
    # not reentrant, because a reentrant checkpoint gives no gradients to a layer whose input needs none
    settings = {"use_reentrant": False, "context_fn": context_fn}
    # transformers pins the host memory, which raises without an accelerator; on a CPU inputs are in host memory anyway
    offload = offload and torch.accelerator.is_available()
    # gradient_checkpointing_enable is its name before transformers 5.23
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable(settings, offload=offload)
    except ValueError:  # raised by transformers if no layer supports it
        name = type(model).__name__
        raise RunError(f"train.activation_checkpointing: {name} cannot recompute its layers; use none") from None


def num_positions(config: Any) -> int | None:
    """Return the longest row that a base was made to read, with its rope scaling; None if its config names no limit."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return None
    if first := first_position(config):
        return limit - first
    stretched = [
        int(one["factor"] * (one.get("original_max_position_embeddings") or limit))
        for kind, one in _rope_settings(text)
        if kind in STRETCHED and isinstance(one.get("factor"), int | float)
    ]
    return max(limit, *stretched) if stretched else limit


def first_position(config: Any) -> int:
    """Return the number of a row's first position: 0 for most bases."""
    text = config.get_text_config()
    return 1 + (text.pad_token_id or 0) if text.model_type in AFTER_PADDING else 0


def num_steady_positions(config: Any) -> int | None:
    """Return the positions up to which rotary frequencies do not depend on any row's length; None: they never do."""
    text = config.get_text_config()
    varying = [one for kind, one in _rope_settings(text) if kind in VARYING]
    limits = [one.get("original_max_position_embeddings") or text.max_position_embeddings for one in varying]
    return min(limits, default=None)


def _rope_settings(text: Any) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Yield kind and settings of rotary positions; some models have one dict of them for each kind of layer."""
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for one in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        yield one.get("rope_type", one.get("type")), one
