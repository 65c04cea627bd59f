"""Adapt experts whose weights are 3-D parameters, with one A and one B for each expert."""

import copy
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from lorakit.lora.layer_kinds import LayerKind
from lorakit.lora.lazy_weight import LazyLoraWeight
from lorakit.lora.methods import METHODS
from lorakit.lora.modules_to_save import FunctionalWrapper
from lorakit.lora.targets import Target


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
