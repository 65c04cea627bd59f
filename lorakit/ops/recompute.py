"""What layers read, made again in backward instead of being kept: the products that norms and gates end in.

Autograd already keeps the factors of a product whose gradient it needs, so keeping the product too is waste. Which
they are is read off the graph that made x; a product is the same bits each time, and made once for all that read it.
"""

from collections.abc import Callable
from typing import Any, Final, final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

Make = Callable[[], Tensor]
SIXTEEN: Final = (torch.float16, torch.bfloat16)
PASS_THROUGH_NODES: Final = ("PreBackwardFunctionForModuleBackward", "PostBackwardFunctionModuleBackward")
"""Nodes that DeepSpeed lays around what a module is given and gives: they change no value."""


@final
class RecomputedInput:
    """One x for all the layers that read it: made for the first that asks in backward, let go of by the last.

    It holds the node of the graph that made x, so that nobody else is found by that node's number.
    """

    def __init__(self, node: Any, make: Make) -> None:
        self._node, self._make, self._readers = node, make, 0
        self._made: Tensor | None = None

    def add_reader(self) -> "RecomputedInput":
        """Note one more reader."""
        self._readers += 1
        return self

    def get(self) -> Tensor:
        """x, for one of its readers."""
        x = self._make() if self._made is None else self._made
        self._readers -= 1
        self._made = x if self._readers > 0 else None
        return x


_waiting: WeakValueDictionary[int, RecomputedInput] = WeakValueDictionary()  # by the id of the node that made x


def recomputable(x: Tensor) -> RecomputedInput | None:
    """x once more, from what its own graph keeps for backward; None when it keeps too little.

    Or when somebody else looks after what is kept and gives each tensor back once, as activation checkpointing does.
    """
    if torch.compiler.is_compiling() or x.grad_fn is None or _kept_elsewhere():
        return None
    node: Any = x.grad_fn
    while node is not None and node.name() in PASS_THROUGH_NODES:
        ((node, _),) = node.next_functions
    again = _waiting.get(id(node))
    if again is None:
        make = _maker(node, x.dtype)
        if make is None:
            return None
        again = _waiting[id(node)] = RecomputedInput(node, make)
    return again.add_reader()


def _kept_elsewhere() -> bool:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and not getattr(hooks[0], "unpacks_repeatedly", False)


def _maker(node: Any, dtype: torch.dtype) -> Make | None:
    known = None if node is None else RECOMPUTERS.get(node.name())
    return known(node, dtype) if known else None


def _product(node: Any, dtype: torch.dtype) -> Make | None:
    """a * b. Autograd keeps each factor that the other one's gradient needs; one that it does not need is made too.

    A fixed factor has to be a vector: an engine may take others away until the backward of their own layer.
    """
    (left, _), (right, _) = node.next_functions
    fixed = node._saved_self if left is None else node._saved_other if right is None else None
    if fixed is not None and fixed.numel() > max(fixed.shape, default=1):
        return None
    first = (lambda: node._saved_self) if right is not None else _maker(left, dtype)
    second = (lambda: node._saved_other) if left is not None else _maker(right, dtype)
    if first is None or second is None:
        return None
    return lambda: _checked(first() * second(), dtype)


def _copy(node: Any, dtype: torch.dtype) -> Make | None:
    """A float32 product, rounded to 16 bits: a factor of a product of 16 bits, or that product itself.

    Not to float32: a factor of a float32 product might have any dtype.
    """
    if dtype not in SIXTEEN:
        return None
    ((inner, _),) = node.next_functions
    exact = _maker(inner, torch.float32)
    return None if exact is None else lambda: exact().to(dtype)


def _ours(node: Any, dtype: torch.dtype) -> Make | None:
    """What gated.py and normed.py make."""
    return lambda: _checked(node.again(node), dtype)


def _checked(made: Tensor, dtype: torch.dtype) -> Tensor:
    assert made.dtype == dtype, f"a product of {made.dtype} was taken for one of {dtype}"
    return made


RECOMPUTERS: dict[str, Callable[[Any, torch.dtype], Make | None]] = {
    "MulBackward0": _product, "ToCopyBackward0": _copy, "_GatedBackward": _ours,
    "_RMSNormBackward": _ours,
}  # fmt: skip
