"""Add each token's adapter to the output of a layer. The model's own weights are read and never written.

A layer computes its own output first, so a token without an adapter is the plain base to the bit. Its forward hook then
adds each adapter's update in place to the tokens that the route gives it (decision 0009).
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorakit.errors import LorakitError
from lorakit.lora.layer_kinds import LayerKind, scale_embedding
from lorakit.lora.modules_to_save import replace_logit_rows
from lorakit.ops._internals import remove_forward_hooks
from lorakit.ops.batch_invariance import WIDTH_STEP, is_height_dependent
from lorakit.slots.routing import Adapter, Route, Slot, TokenGroup


class SharedByCopies:
    """A hook or forward that follows a route. A copied model follows the same route, so it has the same object."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a context variable cannot be copied


@final
class SlotHook(SharedByCopies):
    """The forward hook of one layer. `route` is a context variable, so calls in several threads do not mix."""

    def __init__(self, name: str, kind: LayerKind | None, route: ContextVar[Route | None]) -> None:
        self.name = name
        self._kind = kind
        self._route = route

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> Tensor:
        route = self._route.get()
        if route is None or not route.has_adapters:
            return y
        update = route.only_update(self.name, y.dtype) if isinstance(y, Tensor) else None  # a router's is a tuple
        if update is not None and (x := _layer_input(args, kwargs)).dtype == y.dtype:  # most calls of one adapter
            A, B = update
            S = F.linear(x.reshape(-1, x.shape[-1]).to(A.dtype), A)
            _add_product(y.view(-1, y.shape[-1]), S, B)
            return y
        if route.only_adds(self.name) is None:
            return y
        changed = self._changed(route, layer, args, kwargs, y)
        is_head = route.num_new_tokens > 0 and any(slot.new_rows is not None for slot in route.slots(self.name))
        return self._with_new_logits(route, _layer_input(args, kwargs), changed) if is_head else changed

    def _changed(
        self, route: Route, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor
    ) -> Tensor:
        x = _layer_input(args, kwargs)
        if route.is_uniform:
            slot = route.slot(route.adapters[0], self.name)
            assert slot is not None
            return self._apply_slot(slot, layer, x, slot.replacement(*args, **kwargs) if slot.replacement else y)
        span = route.span(self.name, y)
        if span == 1 and x.is_floating_point() and route.only_adds(self.name):
            self._add_updates(route, x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1]))
            return y
        groups = [(route.slot(adapter, self.name), tokens) for adapter, tokens in route.groups(span, y.device)]
        slots = [(slot, tokens) for slot, tokens in groups if slot is not None]
        x = x.reshape(-1, x.shape[-1]) if x.is_floating_point() else x.reshape(-1)
        flat = y.view(-1, y.shape[-1])
        takes_all = is_height_dependent(flat) and span < WIDTH_STEP  # where its own tokens are too few
        for slot, tokens in slots:
            part = slice(None) if takes_all else tokens
            old = own = flat.clone() if takes_all else flat[tokens]
            if slot.replacement is not None:
                # on all tokens, because other arguments than x need not have an entry for each token of x
                old = slot.replacement(*args, **kwargs).reshape(flat.shape)[part]
            new = self._apply_slot(slot, layer, x[part], old)
            if takes_all:
                flat[tokens] = new[tokens]
            elif isinstance(tokens, Tensor) or new is not own:
                flat[tokens] = new
        return y

    def _with_new_logits(self, route: Route, x: Tensor, y: Tensor) -> Tensor:
        """Return y, then each token's logits of its adapter's new tokens, else -infinity: a probability of 0."""
        num_new = route.num_new_tokens
        wide = y.new_full((*y.shape[:-1], num_new), -math.inf)
        own = x.reshape(-1, x.shape[-1])
        flat = wide.view(-1, num_new)
        everywhere: list[TokenGroup] = [(route.adapters[0], slice(None))]
        groups = everywhere if route.is_uniform else route.groups(route.span(self.name, y), y.device)
        for adapter, tokens in groups:
            slot = route.slot(adapter, self.name)
            if slot is not None and slot.new_rows is not None:
                flat[tokens, : len(slot.new_rows)] = F.linear(own, slot.new_rows.to(x.dtype))[tokens]
        return torch.cat([y, wide], -1)

    def _add_updates(self, route: Route, x: Tensor, y: Tensor) -> None:
        """Add the updates of all adapters to y (rows, out), for x (rows, in): one token of each row."""
        for block, table in route.blocks(self.name, x):
            slots = len(block.A)
            own = x.index_select(0, table.tokens).view(slots, -1, x.shape[-1]).to(block.A.dtype)
            S = torch.bmm(own, block.A.transpose(1, 2))
            new = y.index_select(0, table.tokens).view(slots, -1, y.shape[-1])
            _add_product(new, S, block.B)
            y.index_copy_(0, table.own, new.view(-1, y.shape[-1]).index_select(0, table.indices))

    def _apply_slot(self, slot: Slot, layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Return y with the slot's change. Overwrites y, which is the layer's own new output or tokens of it."""
        layer = slot.replacement or layer
        if slot.rows is not None:
            y = _replace_rows(layer, x, y, *slot.rows)
        if slot.factors is None:
            return y
        assert self._kind is not None
        if slot.gain is not None:
            bias = getattr(layer, "bias", None)
            y = y.mul_(slot.gain) if bias is None else y.sub_(bias).mul_(slot.gain).add_(bias)
        dtype = torch.promote_types(y.dtype, slot.factors.A.dtype)
        own = x if self._kind.takes_ids else x.to(dtype)
        S = self._kind.shrink(layer, own, slot.factors.A.to(dtype))
        _add_product(y.view(-1, y.shape[-1]), S.reshape(-1, S.shape[-1]), slot.factors.B.to(dtype))
        return y


def _add_product(y: Tensor, S: Tensor, B: Tensor) -> None:
    """Add S B to y in place, with one rounding. B may have a wider dtype than y."""
    if B.dtype != y.dtype:
        y.add_(S @ B)
    elif y.dim() == 3:
        y.baddbmm_(S.to(y.dtype), B)
    else:
        y.addmm_(S.to(y.dtype), B)


def _replace_rows(layer: nn.Module, x: Tensor, y: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    """Return y with other rows: of an embedding, looked up for ids x; of a head, as logits for hidden states x."""
    if x.is_floating_point():
        return replace_logit_rows(y, x, layer.get_parameter("weight"), tokens, rows)
    matches = x[..., None] == tokens
    own = F.embedding(matches.int().argmax(-1), scale_embedding(layer, rows))
    return torch.where(matches.any(-1, keepdim=True), own, y)


@final
class NewTokenEmbedding(SharedByCopies):
    """The forward of an embedding for ids of new tokens too: they get NaN, until the hook puts an adapter's rows there.

    So a new token in a row of another adapter, or of the base, is noticed where the logits are read.
    """

    def __init__(self, embedding: nn.Module) -> None:
        self._forward = embedding.forward
        self._num_rows = len(embedding.get_parameter("weight"))

    @classmethod
    def install(cls, embedding: nn.Module) -> None:
        if not isinstance(embedding.__dict__.get("forward"), cls):
            embedding.__dict__["forward"] = cls(embedding)

    def __call__(self, ids: Tensor, **kwargs: Any) -> Tensor:
        rows: Tensor = self._forward(ids.clamp(max=self._num_rows - 1), **kwargs)
        return rows.masked_fill_((ids >= self._num_rows)[..., None], math.nan)


@final
class PerAdapterExperts(SharedByCopies):
    """The forward of experts, or of their router, in which tokens have no rows: each adapter's go through its copy."""

    def __init__(self, name: str, forward: Callable[..., Any], route: ContextVar[Route | None]) -> None:
        self._name = name
        self._forward = forward
        self._route = route

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        route = self._route.get()
        if route is None or not route.slots(self._name):
            return self._forward(*args, **kwargs)
        if route.is_uniform:
            return self._forward_of(route, route.adapters[0])(*args, **kwargs)
        x = _layer_input(args, kwargs)
        groups = route.groups(route.span(self._name, x if x.dim() == 2 else None), x.device)
        results = []
        for adapter, tokens in groups:

            def own(value: Any, tokens: slice | Tensor = tokens) -> Any:
                # a vector is no token's: a router's bias has a number for each expert, as many as tokens perhaps
                is_per_token = isinstance(value, Tensor) and value.dim() > 1 and len(value) == len(x)
                return value[tokens] if is_per_token else value

            forward = self._forward_of(route, adapter)
            results.append(forward(*map(own, args), **{key: own(value) for key, value in kwargs.items()}))
        if isinstance(results[0], Tensor):
            return _scatter(results, groups, len(x))
        return tuple(_scatter(parts, groups, len(x)) for parts in zip(*results, strict=True))

    def _forward_of(self, route: Route, adapter: Adapter | None) -> Callable[..., Any]:
        slot = route.slot(adapter, self._name)
        return slot.replacement if slot is not None and slot.replacement is not None else self._forward


def _scatter(parts: Sequence[Tensor], groups: Sequence[TokenGroup], count: int) -> Tensor:
    """Return the tokens' results in the order of the tokens."""
    result = parts[0].new_empty(count, *parts[0].shape[1:])
    for part, (_, own) in zip(parts, groups, strict=True):
        result[own] = part
    return result


@final
class RouteLengthHook(SharedByCopies):
    """The pre-hook of a model that adds the tokens of a pass to its route. without_route: called for a pass without."""

    def __init__(self, route: ContextVar[Route | None], without_route: Callable[[], None]) -> None:
        self._route = route
        self._without_route = without_route

    def __call__(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        route = self._route.get()
        if route is None:
            self._without_route()
            return
        if torch.is_grad_enabled() and model.training and getattr(model, "is_activation_checkpointing", False):
            remedy = "call model.model.activation_checkpointing_disable()"
            raise LorakitError(f"activation checkpointing computes layers again in backward, without adapter; {remedy}")
        tokens = model_input(args, kwargs)
        if tokens is not None and tokens.dim() > 1:
            self._route.set(route.of_pass(tokens.shape[1]))  # until the call ends


def model_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the token ids or embeddings of a model's call, (rows, tokens, ...); None if it has neither."""
    named = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
    return args[0] if args else next((value for value in named if value is not None), None)


def _layer_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else next(iter(kwargs.values()))


def sharing_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module without forward hooks of adapters, whose tensors are the module's own."""
    shared = {id(tensor): tensor for tensor in [*module.parameters(), *module.buffers()]}
    copied = copy.deepcopy(module, shared)  # a tensor in deepcopy's memo is not copied
    for part in copied.modules():  # else the copy would follow the routes of the base
        remove_forward_hooks(part, SlotHook)
        if isinstance(part.__dict__.get("forward"), SharedByCopies):
            del part.__dict__["forward"]
    return copied


def copy_with(layer: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of a layer with these tensors and no forward hooks. All other tensors are the layer's own."""
    replacement = sharing_copy(layer)
    remove_forward_hooks(replacement)
    for name, tensor in tensors.items():
        replacement.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return replacement
