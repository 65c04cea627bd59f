"""Give each rank some tokens between the blocks of a model, where ranks share every weight of a block.

Norms, residual sums and dropout work on single tokens, so no rank needs all of them there (Megatron-LM's sequence
parallelism, Korthikanti et al. 2022, arXiv 2205.05198). A block's input is gathered and its partial outputs are
reduce-scattered: the two halves of an all-reduce, so as many bytes are sent, and what the norms save is divided.

The gathered x is not saved. For the gradient of an adapter's A, the layer's backward defers: the gradient of x A^T goes
into the message of the gradient of x, and the gather's backward multiplies it with this rank's tokens of x.

Invariant: the ranks' tokens one after the other are the tokens of the micro-batch, in order, without padding.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lorakit.ops.dropout import DropoutMask
from lorakit.ops.recompute import GradientOfA, RecomputedInput, gradient_of_A, recomputable
from lorakit.parallel.axis import exchange
from lorakit.parallel.tensor.weight_group import WeightGroup, copy_in, sum_out

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # of a module's call


@final
@dataclass(frozen=True, eq=False)
class TokenShard:
    """The tokens of a micro-batch that this rank has. lines, tokens: shape of the micro-batch."""

    group: WeightGroup
    lines: int
    tokens: int

    @property
    def own(self) -> slice:
        """This rank's tokens, of all lines one after the other."""
        part = self.group.part(self.lines * self.tokens)
        return slice(part.start, part.stop)

    def take(self, full: Tensor) -> Tensor:
        """Return this rank's tokens (1, tokens here, width) of (lines, tokens, width), in memory of their own."""
        return full.flatten(0, 1)[self.own][None].clone()

    def gather(self, own: Tensor) -> Tensor:
        """Undo `take`."""
        rows = self.group.gathered(own[0], self.lines * self.tokens)
        # in place, because FSDP2 warns of a layer whose output is a view
        return rows.resize_(self.lines, self.tokens, rows.shape[1])

    def scatter(self, partial: Tensor) -> Tensor:
        """Return this rank's tokens of the sum of the ranks' (lines, tokens, width)."""
        return self.group.scattered(partial.flatten(0, 1))[None]


@final
class SequenceRegion:
    """The part of a model between its blocks, where each rank has some tokens, unless `disabled_because` says why."""

    def __init__(self, group: WeightGroup) -> None:
        self.group = group
        self.disabled_because: str | None = None
        self.shape: tuple[int, ...] = (0, 0)
        """(lines, tokens) of the micro-batch under way; recomputation in backward reads it too"""

    @property
    def is_cut(self) -> bool:
        """True if each rank has some of the tokens."""
        return self.disabled_because is None

    @property
    def shard(self) -> TokenShard | None:
        """This rank's tokens of the micro-batch; None if it has all."""
        return TokenShard(self.group, self.shape[0], self.shape[1]) if self.is_cut else None

    @contextmanager
    def disabled(self, because: str) -> Iterator[None]:
        """Give every rank all tokens inside of the block."""
        before = self.disabled_because
        self.disabled_because = before or because
        try:
            yield
        finally:
            self.disabled_because = before

    def enter(self, layer: nn.Module, args: Any, kwargs: Any) -> Arguments | None:
        """Take this rank's tokens of the hidden states, as a forward pre-hook of the first layer."""
        self.shape = hidden_states(args, kwargs).shape[:2]
        if (shard := self.shard) is None:
            return None
        return changed(args, kwargs, lambda full: exchange(full, shard.take, shard.gather))

    def leave(self, layer: nn.Module, args: Any, output: Any) -> Any:
        """Return all tokens, as a forward hook of the last layer, for what every rank computes alike."""
        if isinstance(output, tuple):
            return (self.gathered(output[0], summed=False), *output[1:])
        return self.gathered(output, summed=False)

    def before_head(self, head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """Return all tokens, as a forward pre-hook of the output head."""
        return (self.gathered(args[0], summed=False), *args[1:])

    def gathered(self, own: Tensor, *, summed: bool) -> Tensor:
        """Return all tokens, (lines, tokens, width). summed: the ranks' gradients are partial sums; else the same."""
        if (shard := self.shard) is None:
            return own
        return exchange(own, shard.gather, shard.scatter if summed else shard.take)

    def after(self, layer: nn.Module, args: Any, output: Any) -> Any:
        """Sum partial outputs, as a forward hook of a layer that is cut by inputs, or of a block with experts."""
        if isinstance(output, tuple):
            return (self.after(layer, args, output[0]), *output[1:])
        if (shard := self.shard) is None:
            return sum_out(output, self.group)
        return exchange(output, shard.scatter, shard.gather)


@final
class GatheredInput:
    """Hooks of one block, and of its layers that are cut by outputs, such as q, k and v.

    With tokens in parts, the block's input is gathered once. Otherwise it is copied in where such a layer reads it,
    once however many of them do, so that another reader of it gets its exact gradient.

    sums_all: what all of the block's modules read, router included, has a gradient that is a partial sum, because the
    block's output is one; so its input is copied in where it begins.
    """

    def __init__(self, region: SequenceRegion, *, sums_all: bool = False) -> None:
        self._region = region
        self._sums_all = sums_all
        self.factors: list[Callable[[], Tensor]] = []
        """return the A of the block's layers that are cut by outputs, in each call, because engines replace them"""
        self._gathered = False
        self._x: Tensor | None = None
        self._read: Tensor | None = None

    def before(self, block: nn.Module, args: Any, kwargs: Any) -> Arguments | None:
        """Gather the input, as a forward pre-hook of the block."""
        self._gathered = False
        if (shard := self._region.shard) is None:
            if not self._sums_all:
                return None
            self._gathered = True
            return changed(args, kwargs, lambda x: copy_in(x, self._region.group))
        own = hidden_states(args, kwargs)
        factors: list[Tensor] = []
        # a first layer's input has no gradient to send, so there nothing would go along with it, and x is saved
        if own.requires_grad and torch.is_grad_enabled():
            factors = [A for factor in self.factors if (A := factor()).requires_grad]
        self._gathered = True
        recomputed = recomputable(own) if factors else None
        self._read = _GatheredInput.apply(own, shard, recomputed, *factors)  # type: ignore[no-untyped-call]
        return changed(args, kwargs, lambda own: self._read)

    def before_layer(self, layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Copy the input in, as a forward pre-hook of a layer."""
        if self._gathered:
            return None
        if self._x is not args[0]:
            self._x = args[0]
            self._read = copy_in(args[0], self._region.group)
        assert self._read is not None
        return (self._read, *args[1:])

    def forget(self, block: nn.Module, args: Any, output: Any) -> None:
        """Free the input, as a forward hook of the block."""
        self._x = self._read = None
        self._gathered = False


def hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden states that a module is called with, or raise RuntimeError."""
    x = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(x, Tensor) or x.dim() != 3:
        raise RuntimeError("no hidden states (lines, tokens, width) come in")
    return x


def changed(args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Any]) -> Arguments:
    """Return the arguments of a call with other hidden states."""
    x = change(hidden_states(args, kwargs))
    return ((x, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": x})


@final
class _GatheredInput(torch.autograd.Function):
    """All tokens, for layers in parts: their gradient is a partial sum. factors: A, with gradients of own tokens."""

    @staticmethod
    def forward(
        ctx: Any, own: Tensor, shard: TokenShard, recomputed: RecomputedInput | None, *factors: Tensor
    ) -> Tensor:
        own_factors = {id(A) for A in factors}
        products: dict[int, tuple[Tensor, DropoutMask | None]] = {}  # id of A -> gradient of x A^T, mask of x'

        def defer(A: Tensor) -> GradientOfA | None:
            """Return the function that a layer's backward calls instead of computing A's gradient; None: another A."""
            key = id(A)

            def note(D: Tensor, mask: DropoutMask | None) -> None:
                products[key] = D, mask

            return note if key in own_factors else None

        ctx.shard = shard
        ctx.products = products
        ctx.defer = defer  # read by `ops.recompute.gradient_without_x`
        ctx.recomputed = recomputed
        ctx.factors = [(id(A), A.dtype) for A in factors]
        ctx.save_for_backward(*([own] if factors and recomputed is None else []))
        return shard.gather(own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Any) -> Any:
        products = ctx.products
        parts = [outer[0].flatten(0, 1), *(gradient for gradient, _ in products.values())]
        total = ctx.shard.group.scattered(torch.cat(parts, 1) if products else parts[0])
        own_dx, *own = total.split([part.shape[1] for part in parts], 1)
        gradients = dict(zip(products, own, strict=True))
        if products:  # not of layers whose own backward has computed A's gradient
            x = ctx.saved_tensors[0] if ctx.recomputed is None else ctx.recomputed.get()
        dA: list[Tensor | None] = []
        for A, dtype in ctx.factors:
            if A in products:
                mask = products[A][1]
                own_mask = None if mask is None else mask.of(ctx.shard.own)
                dA.append(gradient_of_A(gradients[A], x, own_mask, dtype))
            else:
                dA.append(None)
        products.clear()
        return own_dx[None], None, None, *dA
