"""The layer with a quantised weight: y = x W^T with W dequantised for each product, in forward and backward alike."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorakit.lora.layer_kinds import LayerKind, QuantizedLinear
from lorakit.ops.products import frozen_linear
from lorakit.quant.schemes import QuantScheme


@dataclass(frozen=True)
class QuantizationInfo:
    """Scheme, shape and dtype of a layer's quantised weight; its tensors are parameters of the layer."""

    scheme: QuantScheme
    shape: tuple[int, int]  # (out, in)
    dtype: torch.dtype  # dtype that the layer computes in
    num_experts: int = 0  # of which each has such a weight; 0: a layer


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
