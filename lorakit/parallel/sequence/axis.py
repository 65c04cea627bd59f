"""The axis `sequence`: ranks that share the tokens of a line, which are exchanged in attention alone (`ulysses`).

`training.model_checks` compares a line that is cut with the full one.
"""

from typing import Any, ClassVar, Final, final

from torch import nn

from lorakit.base.layers import other_layer_kinds
from lorakit.base.lazy import LazyBase
from lorakit.data.batch import Batch
from lorakit.errors import RunError
from lorakit.lora.spec import AdapterSpec
from lorakit.objectives.cross_entropy import LossModel
from lorakit.ops.packed_attention import can_pack_attention
from lorakit.parallel.axis import Axis, even_range
from lorakit.parallel.sequence.ulysses import HEAD_PARAMETERS, UlyssesExchange, checked_kv_repeats

REMEDY: Final = "and tokens are exchanged in transformers' causal attention alone, full or in a window; leave it out"


@final
class SequenceAxis(Axis):
    """Ranks with other tokens of the same rows."""

    name: ClassVar[str] = "sequence"
    exchange: UlyssesExchange | None = None
    """of heads around attention; None before `cut`"""

    def check_fits(self, model: nn.Module, spec: AdapterSpec | None = None) -> None:
        check_sequence_fits(model, self.group.size)

    def cut(self, loss_model: LossModel, weights: LazyBase | None, label_share: float) -> LazyBase | None:
        self.exchange = UlyssesExchange(self.group.device_group, self.group.rank, self.group.size)
        loss_model.register_forward_pre_hook(self.exchange.before_forward, with_kwargs=True)
        return weights

    def slice(self, batch: Batch) -> Batch:
        line = batch.with_tokens(self.group.size)  # one for each rank, because a forward of no token is undefined
        own = even_range(line.input_ids.shape[1], self.group.size, self.group.rank)
        return line.part(own.start, own.stop)


def check_sequence_fits(model: nn.Module, num_ranks: int) -> None:
    """Raise RunError unless so many ranks can share the lines of a model, which may be on meta.

    Kinds of layers, the attention's interface or numbers of heads can prevent it.
    """
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
