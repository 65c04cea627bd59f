"""The number of positions that a base has: the longest row that it can read as it was made to."""

from typing import Any, Final

STRETCHED: Final = ("linear", "yarn", "dynamic", "longrope", "ntk")
"""kinds of rotary positions that reach ``factor`` times as far as those the base was first trained with"""


def num_positions(config: Any) -> int | None:
    """Return a base's ``max_position_embeddings``, stretched by its rope scaling; None if its config names no limit."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return None
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    # some models have one dict of settings for each kind of layer
    settings = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    stretched = [
        int(one["factor"] * (one.get("original_max_position_embeddings") or limit))
        for one in settings
        if one.get("rope_type", one.get("type")) in STRETCHED and isinstance(one.get("factor"), int | float)
    ]
    return max(limit, *stretched) if stretched else limit
