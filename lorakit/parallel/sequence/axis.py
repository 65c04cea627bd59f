"""The axis `sequence`: ranks that share the tokens of a line, and exchange tokens for heads around attention.

All other modules of a transformer's layer work on single tokens, so a rank with some tokens of all heads gets all
tokens of some heads there alone (DeepSpeed Ulysses, Jacobs et al. 2023, arXiv 2309.14509). One message carries queries,
keys and values, and one the outputs back; backward sends the gradients the same two ways. `training.model_checks`
compares a line that is cut with the full one.
"""

import copy
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lorakit.base.layers import other_layer_kinds
from lorakit.base.lazy import LazyBase
from lorakit.data.batch import Batch
from lorakit.errors import RunError
from lorakit.lora.spec import AdapterSpec
from lorakit.objectives.cross_entropy import LossModel
from lorakit.ops.packed_attention import AttendRows, Heads, Masks, RowLengths, can_pack_attention
from lorakit.parallel.axis import Axis, exchange
from lorakit.parallel.group import Group, even_counts

REMEDY: Final = "and tokens are exchanged in transformers' causal attention alone, full or in a window; leave it out"


@final
class SequenceAxis(Axis):
    """Ranks with other tokens of the same rows."""

    name: ClassVar[str] = "sequence"

    @staticmethod
    def check_fits(model: nn.Module, spec: AdapterSpec | None, num_ranks: int) -> None:
        name = type(model).__name__
        if others := other_layer_kinds(model):
            raise RunError(f"parallel.sequence: {name} has layers of the kind {', '.join(others)}, {REMEDY}")
        if any(hasattr(module, "sinks") for module in model.modules()):  # which the attention function reads
            raise RunError(f"parallel.sequence: {name} has parameters of each head, which are not shared; leave it out")
        if not can_pack_attention(model):
            raise RunError(f"parallel.sequence: {name} has an attention of its own, {REMEDY}")
        config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
        num_heads = int(getattr(config, "num_attention_heads", 0) or 1)
        num_kv_heads = int(getattr(config, "num_key_value_heads", 0) or num_heads)
        checked_kv_repeats(name, num_heads, num_kv_heads, num_ranks)

    def cut(self, loss_model: LossModel, weights: LazyBase | None, label_share: float) -> LazyBase | None:
        if loss_model.objective.per is None:
            raise RunError(
                "parallel.sequence: a process has some label tokens of each row alone; give lorakit.Objective"
                ' per="token" if every term and metric is a sum over label tokens, else per="row", for scores of rows'
            )
        loss_model.register_forward_pre_hook(self.before_forward, with_kwargs=True)
        return weights

    def slice(self, batch: Batch) -> Batch:
        line = batch.with_tokens(self.group.size)  # one for each rank, because a forward of no token is undefined
        own = self.group.part(line.input_ids.shape[1])
        return line.part(own.start, own.stop)

    def add_up(self, parts: Tensor) -> Tensor:
        return exchange(parts, self.group.sum, lambda gradient: gradient)  # of each rank's own tokens

    def before_forward(self, loss_model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Exchange heads around the attention to rows that are here in part, as a forward pre-hook of a loss model."""
        rows: RowLengths | None = kwargs.get("row_lengths")
        if rows is not None and kwargs["input_ids"].shape[1] < sum(rows.lengths):
            rows.wrapper = self.attend

    def attend(
        self, attend_rows: AttendRows, module: nn.Module, heads: Heads, masks: Masks, rows: RowLengths
    ) -> Tensor:
        """Return the attention to full rows (1, tokens here, heads, size), for the heads of this rank's tokens."""
        module, heads = self.to_heads(module, heads, sum(rows.lengths))
        return self.to_tokens(attend_rows(module, heads, masks.of_full_line(rows.lengths)))

    def to_heads(self, module: nn.Module, heads: Heads, num_tokens: int) -> tuple[nn.Module, Heads]:
        """Give every rank all tokens of its part of the heads. Raises RunError: as `checked_kv_repeats`.

        heads: queries, keys and values of this rank's tokens, each (1, heads, tokens here, size). num_tokens: of the
        line. Returns the module for the attention function, and queries, keys, values (1, heads here, tokens, size).
        """
        repeats = checked_kv_repeats(type(module).__name__, heads[0].shape[1], heads[1].shape[1], self.group.size)
        query = heads[0]
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in heads[1:])
        counts = even_counts(num_tokens, self.group.size)
        # (ranks, tokens here, heads of that rank x size), side by side in one message
        parts = [part[0].unflatten(0, (self.group.size, -1)).permute(0, 2, 1, 3) for part in (query, key, value)]
        sent = torch.cat([part.flatten(2) for part in parts], dim=2).flatten(0, 1)
        received = _all_to_all(sent, [query.shape[2]] * self.group.size, counts, self.group)
        sizes = [part.shape[2:] for part in parts]
        pieces = received.split([one.numel() for one in sizes], dim=1)
        query, key, value = (
            piece.unflatten(1, size).transpose(0, 1)[None] for piece, size in zip(pieces, sizes, strict=True)
        )
        if repeats > 1:  # keys and values are repeated already, and the attention function reads how often it must
            module = copy.copy(module)
            module.num_key_value_groups //= repeats  # type: ignore[assignment, operator]
        return module, (query, key, value)

    def to_tokens(self, output: Tensor) -> Tensor:
        """Give every rank all heads of its tokens, (1, tokens here, heads, size), for (1, tokens, heads here, size)."""
        num_tokens, *shape = output.shape[1:]
        counts = even_counts(num_tokens, self.group.size)
        own_counts = [counts[self.group.rank]] * self.group.size
        received = _all_to_all(output[0].flatten(1), counts, own_counts, self.group)
        tokens: Tensor = received.unflatten(0, (self.group.size, -1)).unflatten(2, shape).transpose(0, 1).flatten(1, 2)
        return tokens[None]


def checked_kv_repeats(name: str, num_heads: int, num_kv_heads: int, num_ranks: int) -> int:
    """Return how often key-value heads are repeated, to divide over ranks as the queries', or raise RunError."""
    repeats = num_ranks // math.gcd(num_kv_heads, num_ranks)
    if num_heads % num_ranks == 0 and num_heads // num_kv_heads % repeats == 0:
        return repeats
    remedy = f"choose a divisor of {num_heads}" if num_heads > 1 else "leave it out"
    heads = f"{num_heads} heads of {name} with {num_kv_heads} heads of keys and values"
    raise RunError(f"parallel.sequence: {num_ranks} processes cannot share the {heads}; {remedy}")


def _all_to_all(sent: Tensor, sent_counts: Sequence[int], received_counts: Sequence[int], group: Group) -> Tensor:
    """Send consecutive rows of (rows, width) to each rank, and return the rows that the ranks sent, in their order."""

    def to_ranks(sent_counts: Sequence[int], received_counts: Sequence[int], rows: Tensor) -> Tensor:
        received = rows.new_empty(sum(received_counts), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), received_counts, sent_counts, group=group.device_group)
        return received

    back = partial(to_ranks, received_counts, sent_counts)
    return exchange(sent, partial(to_ranks, sent_counts, received_counts), back)
