"""Many adapters on one model, chosen per row of the batch; the model's own weights are read and never written.

Every adapted layer gets a hook on its output. The layer computes what it always computes, so a row without an adapter
gets the plain base, and the hook adds what the row's adapter adds. Which row uses what is the caller's route.
"""

import copy
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorakit.errors import TargetError
from lorakit.lora.layer_kinds import EMBEDDING, LayerKind, scale_embedding
from lorakit.lora.modules_to_save import replace_logit_rows


@dataclass(frozen=True, eq=False)
class Slot:
    """One adapter in one layer: y + s (x A^T) B^T, on the layer or on the one that stands in for it.

    With a gain g it is b + g (y - b) + s (x A^T) (g B)^T. Rows take the place of what tokens are looked up as, and of
    what gives their logits.
    """

    scale: float = 0.0
    A: Tensor | None = None
    """(r, in)"""
    B: Tensor | None = None
    """(out, r)"""
    replacement: nn.Module | None = None
    """the layer with tensors of the adapter's own in place of the base's"""
    gain: Tensor | None = None
    """(out,), without bias; B holds it already"""
    tokens: Tensor | None = None
    rows: Tensor | None = None
    """(tokens, width)"""

    @property
    def is_low_rank(self) -> bool:
        """Whether it is a low-rank update and nothing else."""
        return self.A is not None and self.replacement is None and self.gain is None and self.rows is None


@dataclass(frozen=True, eq=False)
class Adapter:
    """A loaded adapter: its slots by layer name. Never changed, so a running call keeps what it began with."""

    name: str
    slots: Mapping[str, Slot]


@dataclass(frozen=True)
class StackedAdapters:
    """The adapters of one layer side by side, so that a few rows each with its own cost two products.

    S = (x A^T) masked to each row's own columns; y += S B^T.
    """

    A: Tensor
    """(all ranks, in)"""
    B: Tensor
    """(all ranks, out)"""
    scales: Tensor
    """(all ranks,): s of each column's adapter"""
    others: Tensor
    """(rows, all ranks): True where a column is another adapter's"""


@dataclass(frozen=True, eq=False)
class Route:
    """Which adapter each row of a batch uses; None is the plain base. One entry serves a batch of any size."""

    rows: tuple[Adapter | None, ...]
    stacks: dict[str, StackedAdapters | None] = field(default_factory=dict, repr=False)

    @cached_property
    def is_uniform(self) -> bool:
        """Whether every row uses the same."""
        return all(adapter is self.rows[0] for adapter in self.rows)

    @cached_property
    def groups(self) -> list[tuple[Adapter, slice | Tensor]]:
        """(adapter, its rows): a slice when they are neighbours, else their indices."""
        found: dict[Adapter, list[int]] = {}
        for row, adapter in enumerate(self.rows):
            if adapter is not None:
                found.setdefault(adapter, []).append(row)
        return [
            (a, slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] == len(rows) - 1 else torch.tensor(rows))
            for a, rows in found.items()
        ]

    def stack(self, layer: str, x: Tensor) -> StackedAdapters | None:
        """The adapters of a layer side by side; None when one of them is more than a low-rank update."""
        if layer not in self.stacks:
            slots = [(adapter, adapter.slots[layer]) for adapter, _ in self.groups if layer in adapter.slots]
            self.stacks[layer] = _stack(self.rows, slots, x) if all(slot.is_low_rank for _, slot in slots) else None
        return self.stacks[layer]


def _stack(rows: tuple[Adapter | None, ...], slots: list[tuple[Adapter, Slot]], x: Tensor) -> StackedAdapters:
    factors = [(adapter, slot.A, slot.B, slot.scale) for adapter, slot in slots]
    A = torch.cat([A for _, A, _, _ in factors if A is not None]).to(x.dtype)
    B = torch.cat([B.T for _, _, B, _ in factors if B is not None]).to(x.dtype)
    columns = [(adapter, scale) for adapter, A, _, scale in factors if A is not None for _ in range(A.shape[0])]
    own = torch.tensor([[adapter is row for adapter, _ in columns] for row in rows], device=x.device)
    scales = torch.tensor([scale for _, scale in columns], dtype=x.dtype, device=x.device)
    return StackedAdapters(A, B, scales, ~own)


@final
class SlotHook:
    """The hook of one layer. ``route`` belongs to the calling thread, so concurrent calls do not mix."""

    def __init__(self, name: str, kind: LayerKind | None, route: ContextVar[Route | None]) -> None:
        self.name, self._kind, self._route = name, kind, route

    def __deepcopy__(self, memo: dict[int, Any]) -> "SlotHook":
        return self

    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], y: Tensor) -> Tensor:
        route = self._route.get()
        if route is None:
            return y
        if route.is_uniform:
            slot = None if route.rows[0] is None else route.rows[0].slots.get(self.name)
            return y if slot is None else self._apply_slot(slot, layer, inputs, named, y, slice(None))
        slots = [(adapter.slots[self.name], rows) for adapter, rows in route.groups if self.name in adapter.slots]
        if not slots:
            return y
        x, num_rows = _first(inputs, named), len(route.rows)
        per_row = isinstance(y, Tensor) and x.shape[0] == y.shape[0] == num_rows
        if not per_row or ".experts." in self.name:
            raise TargetError(
                f"{self.name} sees {tuple(x.shape)} of a batch of {num_rows} rows: this model mixes rows there, so"
                " adapters cannot be chosen per row; use one adapter for the whole batch"
            )
        one_token = self._kind is not EMBEDDING and x[0].numel() == x.shape[-1]
        if one_token and (stack := route.stack(self.name, x)) is not None:
            S = F.linear(x, stack.A).view(num_rows, -1).mul_(stack.scales).masked_fill_(stack.others, 0.0)
            y.view(num_rows, -1).addmm_(S.to(y.dtype), stack.B.to(y.dtype))
            return y
        for slot, rows in slots:
            y[rows] = self._apply_slot(slot, layer, inputs, named, y[rows], rows)
        return y

    def _apply_slot(
        self, slot: Slot, layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], y: Tensor,
        rows: slice | Tensor,
    ) -> Tensor:  # fmt: skip
        """y with the slot's change, in place: y is the layer's own fresh output, or rows of it."""
        if slot.replacement is not None:  # on all rows: what else it is given need not be by row
            layer = slot.replacement
            y = layer(*inputs, **named)
            if not (isinstance(rows, slice) and rows == slice(None)):
                y = y[rows]
        x = _first(inputs, named)[rows]
        if slot.rows is not None:
            y = _with_rows(slot, layer, x, y)
        if slot.A is None or slot.B is None:
            return y
        assert self._kind is not None
        if slot.gain is not None:
            bias = getattr(layer, "bias", None)
            y = y.mul_(slot.gain) if bias is None else y.sub_(bias).mul_(slot.gain).add_(bias)
        S = self._kind.shrink(layer, x, slot.A)
        S = S.reshape(-1, S.shape[-1]).to(y.dtype)
        y.view(-1, y.shape[-1]).addmm_(S, slot.B.to(y.dtype).T, alpha=slot.scale)
        return y


def _with_rows(slot: Slot, layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """y with a slot's rows: looked up for ids, or as logits of their tokens for states."""
    assert slot.tokens is not None
    assert slot.rows is not None
    if x.is_floating_point():
        return replace_logit_rows(y, x, layer.get_parameter("weight"), slot.tokens, slot.rows)
    found = x[..., None] == slot.tokens
    return torch.where(
        found.any(-1, keepdim=True), F.embedding(found.int().argmax(-1), scale_embedding(layer, slot.rows)), y
    )


def _first(inputs: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    x: Tensor = inputs[0] if inputs else next(iter(named.values()))
    return x


def copy_with(layer: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of a layer with some tensors of its own; the others are the layer's. It has none of the layer's hooks."""
    shared = {id(tensor): tensor for tensor in [*layer.parameters(), *layer.buffers()]}
    replacement = copy.deepcopy(layer, shared)
    replacement._forward_hooks.clear()
    for name, tensor in tensors.items():
        replacement.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return replacement
