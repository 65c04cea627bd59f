"""Recompute a layer's input in backward instead of saving it, if autograd saved the tensors it is computed from.

An adapted layer needs its input x for the gradient of A. Mostly x is the output of a norm, or the product act(gate) *
up of an MLP: a product whose factors autograd saves for their own gradients. The autograd graph of x shows whether it
is such a product, whatever the architecture. A recomputed x has the same bits, and is computed once for all layers
that read it (q, k and v).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, final
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lorakit.ops._internals import DEEPSPEED_NODES, is_zero3_parameter, saved_factor, saved_tensor_hooks

Recompute = Callable[[], Tensor]
PASSING: Final = (*DEEPSPEED_NODES, "AliasBackward0")  # nodes that change no value
SIXTEEN_BIT: Final = (torch.float16, torch.bfloat16)


@final
class RecomputedInput:
    """An input x shared by several layers: the first reader in backward computes it, the last one frees it."""

    def __init__(self, node: Any, recompute: Recompute) -> None:
        self._node = node  # because `_inputs_by_node` is keyed by its id, and a freed id could be reused
        self._recompute = recompute
        self.readers = 0  # layers that will call `get` once each
        self._x: Tensor | None = None

    def get(self) -> Tensor:
        """Return x for one of the readers."""
        x = self._recompute() if self._x is None else self._x
        self.readers -= 1
        self._x = x if self.readers > 0 else None
        return x


def with_gradient(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return x; its gradient is `change` of the gradient that comes in."""
    alias: Tensor = torch.ops.aten.alias(x)  # with a node of its own, because x has other readers
    if alias.requires_grad:
        alias.register_hook(change)
    return alias


def save_packed(pack: Callable[[Tensor], Tensor | Recompute]) -> AbstractContextManager[None]:
    """Return a context in which autograd saves `pack` of each tensor: a tensor, or a function, called for each use."""
    marked: Any = partial(pack)  # to which an attribute can be given
    marked.unpacks_repeatedly = True
    return saved_tensors_hooks(marked, lambda saved: saved if isinstance(saved, Tensor) else saved())


# weak, so that an entry ends with the graphs of its readers
_inputs_by_node: WeakValueDictionary[int, RecomputedInput] = WeakValueDictionary()


def recomputable(x: Tensor) -> RecomputedInput | None:
    """Return x as an input that backward can recompute; None if too little was saved, or if it is read only once."""
    if torch.compiler.is_compiling() or x.grad_fn is None:
        return None
    hooks = saved_tensor_hooks()
    if hooks is not None and not getattr(hooks[0], "unpacks_repeatedly", False):
        return None  # others, such as activation checkpointing's, unpack each tensor only once
    node: Any = x.grad_fn
    while node is not None and node.name() in PASSING:
        ((node, _),) = node.next_functions
    shared = _inputs_by_node.get(id(node))
    if shared is None:
        recompute = _recompute_of(node, x.dtype)
        if recompute is None:
            return None
        shared = _inputs_by_node[id(node)] = RecomputedInput(node, recompute)
    shared.readers += 1
    return shared


def _recompute_of(node: Any, dtype: torch.dtype) -> Recompute | None:
    """Return the function that recomputes a node's output, which has this dtype; None for any other kind of node."""
    recomputer = None if node is None else RECOMPUTERS.get(node.name())
    return recomputer(node, dtype) if recomputer else None


def _product(node: Any, dtype: torch.dtype) -> Recompute | None:
    """Recompute a * b. Autograd saved each factor that the other one's gradient needs; the other factor is recomputed.

    A factor without gradient must be a vector (a norm's weight), and a copy under ZeRO-3, which frees frozen tensors
    until the backward of their own layer: that is later than the backward of the layers that read the product.
    """
    (left, _), (right, _) = node.next_functions
    frozen = saved_factor(node, "self") if left is None else saved_factor(node, "other") if right is None else None
    if frozen is not None and (frozen.numel() > max(frozen.shape, default=1) or is_zero3_parameter(frozen)):
        return None
    first = (lambda: saved_factor(node, "self")) if right is not None else _recompute_of(left, dtype)
    second = (lambda: saved_factor(node, "other")) if left is not None else _recompute_of(right, dtype)
    if first is None or second is None:
        return None
    return lambda: _checked(first() * second(), dtype)


def _rounded(node: Any, dtype: torch.dtype) -> Recompute | None:
    """Recompute a float32 product rounded to 16 bits. Not one in float32: the graph does not show its input's dtype."""
    if dtype not in SIXTEEN_BIT:
        return None
    ((inner, _),) = node.next_functions
    exact = _recompute_of(inner, torch.float32)
    return None if exact is None else lambda: exact().to(dtype)


def _fused(node: Any, dtype: torch.dtype) -> Recompute | None:
    """Recompute the output of a fused operation of this package by its own function; with the rule of ``_product``."""
    is_freed = any(map(is_zero3_parameter, node.saved_tensors))
    return None if is_freed else lambda: _checked(node.recompute(node), dtype)


def _checked(product: Tensor, dtype: torch.dtype) -> Tensor:
    assert product.dtype == dtype, f"a product of {product.dtype} was taken for one of {dtype}"
    return product


# by the names of autograd's nodes. A renamed node costs memory, not correctness; tests/ops/test_recompute.py fails then
RECOMPUTERS: dict[str, Callable[[Any, torch.dtype], Recompute | None]] = {
    "MulBackward0": _product,
    "ToCopyBackward0": _rounded,
    "_GatedProductBackward": _fused,
    "_RMSNormBackward": _fused,
}
