"""Check that ranks of the axis `sequence` can share the tokens of a line, which meet in attention alone.

`ops.head_exchange` exchanges them there. `training.model_checks` compares a line that is cut with the full one.
"""

from typing import Any, Final

from torch import nn

from lorakit.base.layers import other_layer_kinds
from lorakit.errors import RunError
from lorakit.ops.head_exchange import HEAD_PARAMETERS, checked_kv_repeats
from lorakit.ops.packed_attention import can_pack_attention

REMEDY: Final = "and tokens are exchanged in transformers' causal attention alone, full or in a window; leave it out"


def check_sequence_fits(model: nn.Module, num_ranks: int) -> None:
    """Return if so many ranks can share the lines of a model, which may be on meta.

    Raises:
        RunError: they cannot, because of the kinds of its layers, its attention or its numbers of heads.
    """
    if num_ranks == 1:
        return
    name = type(model).__name__
    if others := other_layer_kinds(model):
        raise RunError(f"parallel.sequence: {name} has layers of the kind {', '.join(others)}, {REMEDY}")
    if any(hasattr(module, parameter) for module in model.modules() for parameter in HEAD_PARAMETERS):
        raise RunError(f"parallel.sequence: {name} has parameters of each head, which are not shared; leave it out")
    if not can_pack_attention(model):
        raise RunError(f"parallel.sequence: {name} has an attention of its own, {REMEDY}")
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    num_heads = int(getattr(config, "num_attention_heads", 0) or 1)
    num_kv_heads = int(getattr(config, "num_key_value_heads", 0) or num_heads)
    checked_kv_repeats(name, num_heads, num_kv_heads, num_ranks)
