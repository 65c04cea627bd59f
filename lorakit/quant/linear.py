"""Layers with quantised weights: y = x W^T with W dequantised for each product, in forward and backward alike.

Of experts one matrix is dequantised at a time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorakit.lora.layer_kinds import LayerKind, QuantizedExperts, QuantizedLinear
from lorakit.ops.products import MATMUL, GetWeight, call_with_full, frozen_linear
from lorakit.quant.schemes import QuantScheme


@dataclass(frozen=True)
class QuantizationInfo:
    """Scheme, shape and dtype of a layer's quantised weight; its tensors are parameters of the layer."""

    scheme: QuantScheme
    shape: tuple[int, int]  # (out, in)
    dtype: torch.dtype  # dtype that the layer computes in
    num_experts: int = 0  # of which each has such a weight; 0: a layer

    def empty_tensors(self, device: torch.device) -> dict[str, Tensor]:
        """Return the quantised tensors by name, those of all experts stacked, without values."""
        experts = (self.num_experts,) if self.num_experts else ()
        shapes = self.scheme.shapes(*self.shape).items()
        return {key: torch.empty((*experts, *shape), dtype=dtype, device=device) for key, (shape, dtype) in shapes}


def dequantized_weight(layer: nn.Module) -> Tensor:
    """Return the weight (out, in) of a quantised layer, in the dtype that the layer computes in."""
    weight: QuantizationInfo = layer.quantization  # type: ignore[assignment]
    # its bias alone may be None
    return weight.scheme.dequantize(layer._parameters, weight.shape, weight.dtype)  # type: ignore[arg-type]


def _run(layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
    return frozen_linear(x, partial(dequantized_weight, layer), bias, by_onednn=getattr(layer, "by_onednn", False))


QUANTIZED: Final = LayerKind(
    "Linear",
    attrgetter("quantization.shape"),
    F.linear,
    dequantized=dequantized_weight,
    quantized_product=_run,
    copied_attributes=("quantization",),
)


@final
class QuantLinear(QuantizedLinear):
    """A linear layer with a quantised weight as direct parameters, because engines shard and gather nothing else."""

    kind = QUANTIZED
    by_onednn = False

    def __init__(self, weight: QuantizationInfo, tensors: Mapping[str, Tensor], bias: nn.Parameter | None) -> None:
        super().__init__()
        self.quantization = weight
        self.dtype = weight.dtype
        self.out_features, self.in_features = weight.shape
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return _run(self, x, self._parameters["bias"])


@final
class QuantExperts(QuantizedExperts):
    """A 3-D parameter of experts in codes, in its place: the forward of their module multiplies by its items."""

    by_onednn = False

    def __init__(self, weight: QuantizationInfo, tensors: Mapping[str, Tensor], *, transposed: bool) -> None:
        super().__init__()
        self.num_values = weight.num_experts * weight.shape[0] * weight.shape[1]
        self.quantization = weight
        self.transposed = transposed  # True if a matrix of the parameter is (in, out), as gpt-oss has it
        self.dtype = weight.dtype
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def __getitem__(self, index: Any) -> "LazyMatrix":
        expert = int(index)

        def read() -> Tensor:
            weight = self.quantization
            own = {name: tensor[expert] for name, tensor in self.named_parameters()}
            return weight.scheme.dequantize(own, weight.shape, weight.dtype)

        return LazyMatrix(read, transposed=self.transposed, by_onednn=self.by_onednn)


@final
class LazyMatrix:
    """One expert's matrix, as its module reads it. read: returns W (out, in)."""

    def __init__(self, read: GetWeight, *, transposed: bool, by_onednn: bool) -> None:
        self._read = read
        self._transposed = transposed
        self._by_onednn = by_onednn

    def full(self) -> Tensor:
        return self._read().T if self._transposed else self._read()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        x, M, bias = (*args, None, None)[:3]
        if (func is F.linear or func in MATMUL) and isinstance(M, cls) and not kwargs:
            multiplies_rows = func is F.linear  # x M^T; else x M
            read = M._read if M._transposed != multiplies_rows else lambda: M._read().T
            return frozen_linear(x, read, bias if multiplies_rows else None, by_onednn=M._by_onednn)
        return call_with_full(cls, func, args, kwargs)  # any other operation
