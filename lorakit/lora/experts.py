"""Adapt experts whose weights are 3-D parameters, with one A and one B for each expert."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from lorakit.lora.layer_kinds import LayerKind, expert_kind, is_linear_like
from lorakit.lora.lazy_weight import LazyLoraWeight
from lorakit.lora.methods import METHODS
from lorakit.lora.modules_to_save import FunctionalWrapper


@dataclass(frozen=True)
class ExpertTarget:
    """A 3-D parameter that gets an adapter."""

    module: str
    parameter: str
    method: str
    rank: int
    alpha: float
    num_experts: int
    out_features: int
    in_features: int
    kind: LayerKind  # of one expert's matrix

    @property
    def name(self) -> str:
        return f"{self.module}.{self.parameter}"


@final
class LoraExperts(FunctionalWrapper):
    """W_e + s B_e A_e for every expert e. The module's own forward runs, and multiplies by `LazyLoraWeight`s.

    W is (E, out, in), or (E, in, out) if transposed. Factors have PEFT's layout: A is (E r, in), stacked as (E, r, in),
    and B (out, r E), stacked as (out, r, E).
    """

    def __init__(self, base: nn.Module, updates: Mapping[ExpertTarget, Mapping[str, Tensor]]) -> None:
        super().__init__(base)
        self.adapted = {target.parameter: target for target in updates}
        for target, tensors in updates.items():
            self.add_tensors(
                {f"{target.parameter}.{part}": tensor for part, tensor in tensors.items()},
                fixed=tuple(f"{target.parameter}.{part}" for part in METHODS[target.method].fixed),
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)  # with the sums, because LazyLoraWeight is no tensor
        tensors: dict[str, Any] = {name: self.get_parameter(name) for name in self._parameter_names}
        tensors |= {name: self.lazy_weight(name) for name in self.adapted}
        return with_attributes(self._original[0], tensors | dict(self.named_buffers()))(*args, **kwargs)

    def effective_tensor(self, name: str) -> Tensor:
        return self.lazy_weight(name).full() if name in self.adapted else self.get_parameter(name)

    def lazy_weight(self, name: str) -> LazyLoraWeight:
        """Return an adapted parameter with its update."""
        target = self.adapted[name]
        W = self.get_parameter(name)
        A, B = (self.get_parameter(f"{name}_{part}").to(W.dtype) for part in ("lora_A", "lora_B"))
        return expert_sum(W, A, B, METHODS[target.method].scale(target.alpha, target.rank), target.kind)


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


def expert_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (module name, module, parameter name) of every 3-D parameter with one matrix for each expert."""
    for name, module in model.named_modules():
        for key, tensor in module.named_parameters(recurse=False):
            is_experts = "expert" in name.rpartition(".")[2].lower() or hasattr(module, "num_experts")
            if tensor.dim() == 3 and min(tensor.shape[1:]) > 1 and is_experts:
                yield name, module, key


def patched_parameters(model: nn.Module) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Yield name and (experts, out, in) of every parameter of experts, and of routers: ``all-linear`` takes both."""
    for name, module, key in expert_parameters(model):
        yield f"{name}.{key}", expert_sizes(module, key)
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")  # of a router, (experts, width)
        is_router = "Router" in type(module).__name__ and not is_linear_like(module)
        if is_router and weight is not None and weight.dim() == 2:
            yield f"{name}.weight", (1, weight.shape[0], weight.shape[1])


def expert_sizes(module: nn.Module, key: str) -> tuple[int, int, int]:
    """Return (experts, out, in) of a 3-D parameter."""
    num_experts, *matrix = module.get_parameter(key).shape
    return num_experts, *expert_kind(module).stored_shape((matrix[0], matrix[1]))
