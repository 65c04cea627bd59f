"""Many adapters on one model, chosen per row of the batch; the model's own weights are read and never written.

Every adapted layer gets a forward hook. The layer computes its own output first, so a row without an adapter is the
plain base to the bit. The hook then adds each row's adapter in place. The caller's route assigns adapters to rows
(decision 0009).
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
from lorakit.ops._internals import remove_forward_hooks


@dataclass(frozen=True, eq=False)
class Slot:
    """One adapter's tensors for one layer: the output is y + s (x A^T) B^T.

    With a gain g (DoRA) it is b + g (y - b) + s (x A^T) (g B)^T, where b is the layer's bias.
    """

    scale: float = 0.0
    A: Tensor | None = None
    """(r, in); None if the adapter has no low-rank update here"""
    B: Tensor | None = None
    """(out, r), multiplied by the gain already if there is one"""
    replacement: nn.Module | None = None
    """a copy of the layer with some tensors of the adapter's own, run instead of it (modules_to_save, biases)"""
    gain: Tensor | None = None
    """m / |V| of DoRA, (out,)"""
    tokens: Tensor | None = None
    """ids of the tokens with rows of their own, (tokens,)"""
    rows: Tensor | None = None
    """(tokens, width): replacement rows of the embedding, and of a head that is tied to it"""

    @property
    def is_low_rank(self) -> bool:
        """True for a low-rank update and nothing else."""
        return self.A is not None and self.replacement is None and self.gain is None and self.rows is None


@dataclass(frozen=True, eq=False)
class Adapter:
    """A loaded adapter: its slots by layer name. Immutable, so that a call in progress is not changed by a swap."""

    name: str
    slots: Mapping[str, Slot]


@dataclass(frozen=True)
class StackedAdapters:
    """The factors of several adapters on one layer, concatenated along the ranks: two products serve all rows.

    S = s (x A^T), zero in the columns of other rows' adapters; y += S B^T.
    """

    A: Tensor
    """(all ranks, in)"""
    B: Tensor
    """(all ranks, out)"""
    scales: Tensor
    """(all ranks,): s of each column's adapter"""
    others: Tensor
    """(rows, all ranks): True where a column belongs to another row's adapter"""


@dataclass(frozen=True, eq=False)
class Route:
    """The adapter of each row of a batch; None is the plain base. One entry alone serves a batch of any size."""

    rows: tuple[Adapter | None, ...]
    stacks: dict[str, StackedAdapters | None] = field(default_factory=dict, repr=False)
    _groups: dict[torch.device, list[tuple[Adapter, slice | Tensor]]] = field(default_factory=dict, repr=False)

    @cached_property
    def is_uniform(self) -> bool:
        """True if every row has the same adapter."""
        return all(adapter is self.rows[0] for adapter in self.rows)

    def groups(self, device: torch.device) -> list[tuple[Adapter, slice | Tensor]]:
        """Return (adapter, its rows): a slice for adjacent rows, because slicing copies nothing, else their indices.

        Indices are made on the device once: from the host they would be sent for every layer and token.
        """
        if device not in self._groups:
            rows_of: dict[Adapter, list[int]] = {}
            for row, adapter in enumerate(self.rows):
                if adapter is not None:
                    rows_of.setdefault(adapter, []).append(row)
            self._groups[device] = [(adapter, _row_index(rows, device)) for adapter, rows in rows_of.items()]
        return self._groups[device]

    def stack(self, layer: str, x: Tensor) -> StackedAdapters | None:
        """Return a layer's stacked adapters, in x's dtype; None if one of them is more than a low-rank update."""
        if layer not in self.stacks:
            slots = [(adapter, adapter.slots[layer]) for adapter, _ in self.groups(x.device) if layer in adapter.slots]
            self.stacks[layer] = _stack(self.rows, slots, x) if all(slot.is_low_rank for _, slot in slots) else None
        return self.stacks[layer]


def _row_index(rows: list[int], device: torch.device) -> slice | Tensor:
    is_adjacent = rows[-1] - rows[0] == len(rows) - 1
    return slice(rows[0], rows[-1] + 1) if is_adjacent else torch.tensor(rows, device=device)


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
    """The forward hook of one layer. `route` is a context variable, so calls in several threads do not mix."""

    def __init__(self, name: str, kind: LayerKind | None, route: ContextVar[Route | None]) -> None:
        self.name, self._kind, self._route = name, kind, route

    def __deepcopy__(self, memo: dict[int, Any]) -> "SlotHook":
        return self  # a context variable cannot be copied, and a copied model follows the same route

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> Tensor:
        route = self._route.get()
        if route is None:
            return y
        if route.is_uniform:
            slot = None if route.rows[0] is None else route.rows[0].slots.get(self.name)
            return y if slot is None else self._apply_slot(slot, layer, args, kwargs, y, slice(None))
        x, num_rows = _layer_input(args, kwargs), len(route.rows)
        groups = route.groups(x.device)
        slots = [(adapter.slots[self.name], rows) for adapter, rows in groups if self.name in adapter.slots]
        if not slots:
            return y
        per_row = isinstance(y, Tensor) and x.shape[0] == y.shape[0] == num_rows
        # experts get tokens of all rows in the order of their routing, whose number may equal that of the rows
        if not per_row or ".experts." in self.name:
            raise TargetError(
                f"{self.name} sees {tuple(x.shape)} of a batch of {num_rows} rows: this model mixes rows there, so"
                " adapters cannot be chosen per row; use one adapter for the whole batch"
            )
        one_token = self._kind is not EMBEDDING and x[0].numel() == x.shape[-1]
        if one_token and (stack := route.stack(self.name, x)) is not None:
            # masked, not multiplied by zero: an infinity in another adapter's columns would become NaN in this row
            S = F.linear(x, stack.A).view(num_rows, -1).mul_(stack.scales).masked_fill_(stack.others, 0.0)
            y.view(num_rows, -1).addmm_(S.to(y.dtype), stack.B.to(y.dtype))
            return y
        for slot, rows in slots:
            y[rows] = self._apply_slot(slot, layer, args, kwargs, y[rows], rows)
        return y

    def _apply_slot(
        self,
        slot: Slot,
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        y: Tensor,
        rows: slice | Tensor,
    ) -> Tensor:
        """Return y with the slot's change. Overwrites y, which is the layer's own new output or rows of it."""
        if slot.replacement is not None:
            # on all rows, because other arguments than x need not have a row for each row of x
            layer = slot.replacement
            y = layer(*args, **kwargs)
            if not (isinstance(rows, slice) and rows == slice(None)):
                y = y[rows]
        x = _layer_input(args, kwargs)[rows]
        if slot.rows is not None:
            y = _replace_rows(slot, layer, x, y)
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


def _replace_rows(slot: Slot, layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return y with a slot's rows: of an embedding, looked up for ids x; of a head, as logits for hidden states x."""
    assert slot.tokens is not None
    assert slot.rows is not None
    if x.is_floating_point():
        return replace_logit_rows(y, x, layer.get_parameter("weight"), slot.tokens, slot.rows)
    matches = x[..., None] == slot.tokens
    rows = F.embedding(matches.int().argmax(-1), scale_embedding(layer, slot.rows))
    return torch.where(matches.any(-1, keepdim=True), rows, y)


def _layer_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    x: Tensor = args[0] if args else next(iter(kwargs.values()))
    return x


def copy_with(layer: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of a layer with these tensors and no forward hooks. All other tensors are the layer's own."""
    shared = {id(tensor): tensor for tensor in [*layer.parameters(), *layer.buffers()]}
    replacement = copy.deepcopy(layer, shared)  # a tensor in deepcopy's memo is not copied
    remove_forward_hooks(replacement)
    for name, tensor in tensors.items():
        replacement.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return replacement
