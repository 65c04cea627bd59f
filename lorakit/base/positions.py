"""The number of positions that a base has: the longest row that it can read as it was made to."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

STRETCHED: Final = ("linear", "yarn", "dynamic", "longrope", "ntk")
"""kinds of rotary positions that reach ``factor`` times as far as those the base was first trained with"""
AFTER_PADDING: Final = (
    "camembert", "data2vec-text", "ibert", "longformer", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta",
    "xlm-roberta-xl", "xmod",
)  # fmt: skip
"""model types whose positions are counted from the padding token's id on, as fairseq does"""
VARYING: Final = ("dynamic", "longrope")  # those whose frequencies depend on the longest row of a forward


def num_positions(config: Any) -> int | None:
    """Return a base's ``max_position_embeddings``, stretched by its rope scaling; None if its config names no limit."""
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
