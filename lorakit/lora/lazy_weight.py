"""Multiply by W + s L R without forming it, for code that only multiplies by W.

A module of experts reads its 3-D parameter and multiplies by it, one expert after another or all at once. A
`LazyLoraWeight` in the parameter's place gives the same results, and no expert's sum is computed or saved for backward.
"""

from collections.abc import Callable
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from lorakit.ops._internals import GROUPED_MM

GROUPED_ALIGNMENT: Final = 16  # bytes: `grouped_mm` takes strides that are multiples of it


@final
class LazyLoraWeight:
    """W + s L R, (..., n, m), for W (..., n, m), L (..., n, r) and R (..., r, m)."""

    def __init__(self, W: Tensor, L: Tensor, R: Tensor, s: float) -> None:
        self.W = W
        self.L = L
        self.R = R
        self.s = s
        self._rows: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None

    def full(self) -> Tensor:
        """Return the sum itself."""
        if self.W.dim() == 2:
            return torch.addmm(self.W, self.L, self.R, alpha=self.s)
        return torch.baddbmm(self.W, self.L, self.R, alpha=self.s)

    def __getitem__(self, index: Any) -> "LazyLoraWeight | Tensor":
        if isinstance(index, int) or (isinstance(index, Tensor) and index.dim() == 0 and index.dtype != torch.bool):
            # unbound once, because the backward of each `L[i]` would fill a tensor of L's size
            self._rows = self._rows or (self.L.unbind(), self.R.unbind())
            return LazyLoraWeight(self.W[index], self._rows[0][int(index)], self._rows[1][int(index)], self.s)
        if isinstance(index, Tensor) and index.dim() == 1:
            return LazyLoraWeight(self.W[index], self.L[index], self.R[index], self.s)
        return self.full()[index]

    def transpose(self, one: int, two: int) -> "LazyLoraWeight | Tensor":
        if {one % self.W.dim(), two % self.W.dim()} == {self.W.dim() - 2, self.W.dim() - 1}:
            return LazyLoraWeight(self.W.mT, self.R.mT, self.L.mT, self.s)
        return self.full().transpose(one, two)

    @property
    def mT(self) -> "LazyLoraWeight | Tensor":
        return self.transpose(-2, -1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's own, which copy and pickle look for
            raise AttributeError(name)
        # W's own where the sum need not be formed for it; anything else that a tensor has is the sum's
        return getattr(self.W if name in ("shape", "dtype", "device") else self.full(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        product = PRODUCTS.get(func)
        if product is not None and [isinstance(arg, cls) for arg in args[:2]] == [False, True]:
            return product(*args, **(kwargs or {}))
        if func is torch.bmm and isinstance(args[0], cls):
            M, x = args
            return torch.baddbmm(torch.bmm(M.W, x), M.L, torch.bmm(M.R, x), alpha=M.s)
        # any other operation gets the sum itself
        args, kwargs = tree_map(lambda arg: arg.full() if isinstance(arg, cls) else arg, (args, kwargs or {}))
        return func(*args, **kwargs)


def _matmul(x: Tensor, M: LazyLoraWeight) -> Tensor:
    return torch.add(x @ M.W, (x @ M.L) @ M.R, alpha=M.s)


def _linear(x: Tensor, M: LazyLoraWeight, bias: Tensor | None = None) -> Tensor:
    return torch.add(F.linear(x, M.W, bias), F.linear(F.linear(x, M.R), M.L), alpha=M.s)


def _grouped_mm(x: Tensor, M: LazyLoraWeight, *, offs: Tensor, **settings: Any) -> Tensor:
    missing = -M.L.shape[-1] % (GROUPED_ALIGNMENT // M.L.element_size())
    L = F.pad(M.L, (0, missing))
    R = F.pad(M.R, (0, 0, 0, missing)).contiguous()
    delta = F.grouped_mm(F.grouped_mm(x, L, offs=offs), R, offs=offs)
    return torch.add(F.grouped_mm(x, M.W, offs=offs, **settings), delta, alpha=M.s)


PRODUCTS: Final[dict[Any, Callable[..., Tensor]]] = {
    F.linear: _linear,
    GROUPED_MM: _grouped_mm,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm), _matmul),
}
"""torch's function -> (x, LazyLoraWeight, ...) -> the same product"""
