"""Adapt experts whose weights are 3-D parameters, with one A and one B for each expert.

A module of experts reads its 3-D parameter and multiplies by it, one expert after another or all at once. A
`LazyLoraWeight` in the parameter's place gives the same results, and no expert's sum is computed or saved for backward.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorakit.lora.layer_kinds import LayerKind
from lorakit.lora.methods import METHODS
from lorakit.lora.modules_to_save import FunctionalWrapper
from lorakit.lora.targets import Target
from lorakit.ops._internals import GROUPED_MM
from lorakit.ops.products import MATMUL, call_with_full

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
        return call_with_full(cls, func, args, kwargs)  # any other operation


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
    **dict.fromkeys((*MATMUL, torch.bmm), _matmul),
}
"""torch's function -> (x, LazyLoraWeight, ...) -> the same product"""


@final
class LoraExperts(FunctionalWrapper):
    """W_e + s B_e A_e for every expert e. The module's own forward runs, and multiplies by `LazyLoraWeight`s.

    W is (E, out, in), or (E, in, out) if transposed. Factors have PEFT's layout: A is (E r, in), stacked as (E, r, in),
    and B (out, r E), stacked as (out, r, E).
    """

    def __init__(self, base: nn.Module, method: str, updates: Mapping[Target, Mapping[str, Tensor]]) -> None:
        super().__init__(base)
        self.method = method
        self.adapted = {target.name.rpartition(".")[2]: target for target in updates}
        for name, tensors in zip(self.adapted, updates.values(), strict=True):
            for part, tensor in tensors.items():
                self.add_tensor(f"{name}.{part}", tensor, trainable=METHODS[method].tensors[part].trainable)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)  # with the sums, because LazyLoraWeight is no tensor
        tensors: dict[str, Any] = {name: self.get_parameter(name) for name in self._parameter_names}
        tensors |= {name: self.lazy_weight(name) for name in self.adapted}
        return with_attributes(self._original[0], tensors | dict(self.named_buffers()))(*args, **kwargs)

    def effective_tensor(self, name: str) -> Tensor:
        return self.lazy_weight(name).full() if name in self.adapted else super().effective_tensor(name)

    def lazy_weight(self, name: str) -> LazyLoraWeight:
        """Return an adapted parameter with its update."""
        target = self.adapted[name]
        W = self.get_parameter(name)
        A, B = (self.get_parameter(f"{name}_{part}").to(W.dtype) for part in ("lora_A", "lora_B"))
        return expert_sum(W, A, B, METHODS[self.method].scale(target.alpha, target.rank), target.kind)


def expert_sum(W: Tensor, A: Tensor, B: Tensor, s: float, kind: LayerKind) -> LazyLoraWeight:
    """Return W_e + s B_e A_e of all experts, for W (E, out, in), or (E, in, out) by its kind, and stored factors."""
    A, B = expert_factors(A, B, len(W))
    return LazyLoraWeight(W, B, A, s) if kind.stored_axis == "out" else LazyLoraWeight(W, A.mT, B.mT, s)


def with_attributes(module: nn.Module, attributes: Mapping[str, Any]) -> nn.Module:
    """Return a shallow copy of a module that reads these attributes in place of its own parameters and buffers."""
    view = copy.copy(module)
    view.__dict__.update(attributes)  # found before `nn.Module.__getattr__` looks for a parameter
    return view


def expert_factors(A: Tensor, B: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return PEFT's stored factors as A (E, r, in) and B (E, out, r)."""
    return A.view(num_experts, -1, A.shape[1]), B.view(B.shape[0], -1, num_experts).permute(2, 0, 1)
