"""Compute with a part of each weight or vocabulary: copy inputs in, sum outputs, over the ranks with the other parts.

A layer that is cut by outputs reads all of x, and its gradient of x is a partial sum. A layer that is cut by inputs
reads its own part of x, and its output is a partial sum. Between the two, nothing is sent (Megatron-LM, Shoeybi et al.
2019, arXiv 1909.08053): two messages for each layer of a transformer forward, and two backward.

A LoRA layer of the same cut adds no message: s (x A^T) B^T is cut, or a partial sum, as x W^T beside it is.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

from lorakit.lora import LoraLinear
from lorakit.lora.methods import LayerCall
from lorakit.objectives.cross_entropy import HeadVocabulary
from lorakit.ops.dropout import DropoutMask, column_keys
from lorakit.ops.recompute import with_gradient
from lorakit.parallel.axis import exchange
from lorakit.parallel.group import Group, even_counts

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # of a module's call


def copy_in(x: Tensor, group: Group) -> Tensor:
    """Return x; its gradient is the sum of the ranks' gradients."""
    return with_gradient(x, group.sum)


def sum_out(y: Tensor, group: Group) -> Tensor:
    """Return the sum of the ranks' y; the gradient of each is the sum's."""
    return exchange(y, group.sum, lambda gradient: gradient)


def hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden states that a module is called with, or raise RuntimeError."""
    x = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(x, Tensor) or x.dim() != 3:
        raise RuntimeError("no hidden states (lines, tokens, width) come in")
    return x


def with_hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> Arguments:
    """Return the arguments of a call with other hidden states."""
    return ((x, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": x})


def copy_input(group: Group, block: nn.Module, args: Any, kwargs: Any) -> Arguments:
    """Copy the hidden states in, as a forward pre-hook of a block with experts, whose output is one sum (`axis`)."""
    return with_hidden_states(args, kwargs, copy_in(hidden_states(args, kwargs), group))


def sum_output(group: Group, layer: nn.Module, args: Any, output: Any) -> Any:
    """Sum partial outputs, as a forward hook of a layer that is cut by inputs, or of a block with experts."""
    return (sum_out(output[0], group), *output[1:]) if isinstance(output, tuple) else sum_out(output, group)


@final
class BlockInput:
    """Hooks of one block, and of its layers that are cut by outputs, such as q, k and v.

    The input is copied in where such a layer reads it, once however many of them do, so that another reader of it gets
    its exact gradient.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._input: tuple[Tensor, Tensor] | None = None  # of the block's call, and its copy

    def before_layer(self, layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Copy the input in, as a forward pre-hook of a layer."""
        if self._input is None or self._input[0] is not args[0]:
            self._input = args[0], copy_in(args[0], self._group)
        return (self._input[1], *args[1:])

    def after_block(self, block: nn.Module, args: Any, output: Any) -> None:
        """Free the input, as a forward hook of the block."""
        self._input = None


@final
class TensorParallelLoraLinear(LoraLinear):
    """A layer cut by inputs: y is a partial sum, which a hook adds up. One cut by outputs stays a `LoraLinear`."""

    def __init__(self, layer: LoraLinear, group: Group) -> None:
        """Take over the attributes of a layer, whose parameters are cut already. group: ranks with other columns."""
        nn.Module.__init__(self)
        self.__dict__.update(layer.__dict__)
        self.group = group

    def inputs(self, x: Tensor) -> LayerCall:
        call = super().inputs(x)
        mask = call.mask
        if isinstance(mask, DropoutMask):
            mask = replace(mask, column_keys=column_keys(self.name, self.group.part(self.in_features), x.device))
        # added once to the sum; times zero and not None, so that a trainable bias has a gradient of zero and not none
        bias = call.bias if call.bias is None or self.group.is_rank_0 else call.bias * 0
        return _PartialCall(self, self.kind, x, bias, mask)


@final
class _PartialCall(LayerCall):
    def change_of_squared_norms(self, A: Tensor, B: Tensor, s: float) -> Tensor:
        assert isinstance(self.layer, TensorParallelLoraLinear)
        return self.layer.group.sum(super().change_of_squared_norms(A, B, s))


@final
class VocabularyShard(HeadVocabulary):
    """The tokens whose rows of an embedding or output head this rank has. size: tokens of the full vocabulary.

    Each rank computes the logits of its own tokens. The maximum and the sum of exponentials of a label's logits, its
    own logit and their mean are exchanged, never the logits (Megatron-LM, section 3).
    """

    def __init__(self, group: Group, size: int) -> None:
        super().__init__(size)
        self.group = group
        self._tokens = group.part(size)
        self._is_here: Tensor  # for each token of an embedding's call: 1.0 if its row is here, else 0.0

    def enter(self, hidden: Tensor) -> Tensor:
        return copy_in(hidden, self.group)

    def max_rows(self) -> int:
        return max(even_counts(self.size, self.group.size))  # of any rank, so that all ranks choose the same chunks

    def rows_of(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        rows = labels - self._tokens.start
        is_here = (rows >= 0) & (rows < len(self._tokens))
        return rows.masked_fill(~is_here, 0), is_here.float()

    def come_before(self, rows: Tensor, labels: Tensor) -> Tensor:
        return rows + self._tokens.start < labels

    def maximum(self, largest: Tensor) -> Tensor:
        return self.group.maximum(largest)

    def sums(self, partial: Sequence[Tensor]) -> Sequence[Tensor]:
        total: Tensor = self.group.sum(torch.cat(tuple(partial), 1))
        return total.split([part.shape[1] for part in partial], 1)

    def before_embedding(self, embedding: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Give an embedding the indices of its own rows, as a forward pre-hook; 0 for a token of another rank."""
        rows, self._is_here = self.rows_of(args[0])
        return (rows, *args[1:])

    def after_embedding(self, embedding: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Return each token's row, from the rank that has it, as a forward hook of an embedding."""
        return sum_out(output.masked_fill(self._is_here[..., None] == 0, 0), self.group)

    def before_head(self, head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Copy the hidden states in, as a forward pre-hook of the output head."""
        return (copy_in(args[0], self.group), *args[1:])

    def after_head(self, head: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Return the logits of all tokens, as a forward hook of the output head."""
        # every rank computes the same with them, so a gradient needs no message
        return exchange(
            output,
            lambda own: self.group.concatenated(own, own.dim() - 1, self.size),
            lambda gradient: gradient[..., self._tokens.start : self._tokens.stop],
        )
