"""The kinds of layer an adapter can sit on: how to recognise one, its sizes, and its product."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear


@dataclass(frozen=True)
class Kind:
    """One kind of linear layer."""

    name: str
    sizes: Callable[[nn.Module], tuple[int, int]]
    """layer -> (out, in), from its attributes: sharded and quantised weights lie about their shape"""
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """(x, stored weight, bias) -> y, bit for bit as the layer itself computes it"""
    transposed: bool
    """whether the weight is stored as (in, out)"""


def _linear_sizes(layer: nn.Module) -> tuple[int, int]:
    assert isinstance(layer, nn.Linear)
    return layer.out_features, layer.in_features


def _conv1d_sizes(layer: nn.Module) -> tuple[int, int]:
    return int(layer.nf), int(layer.nx)  # type: ignore[arg-type]


def _conv1d_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    assert bias is not None
    y = torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight)
    return y.view(*x.shape[:-1], weight.shape[-1])


LINEAR: Final = Kind("Linear", _linear_sizes, F.linear, transposed=False)
CONV1D: Final = Kind("Conv1D", _conv1d_sizes, _conv1d_product, transposed=True)


def is_linear_like(module: nn.Module) -> bool:
    """True for what PEFT's ``all-linear`` calls linear: nn.Linear with its subclasses, and transformers' Conv1D."""
    return isinstance(module, nn.Linear) or _is_conv1d(module)


def kind_of(module: nn.Module) -> Kind | None:
    """The kind of a layer, or None when its product is not known (a Linear with a forward of its own)."""
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return None  # nn.MultiheadAttention reads its weight and never calls it: an adapter would do nothing
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return LINEAR
    return CONV1D if _is_conv1d(module) else None


def adaptable_layers(model: nn.Module) -> dict[str, tuple[Kind, tuple[int, int]]]:
    """Every layer an adapter can sit on: module name -> (kind, (out, in)). Works on the meta device."""
    return {
        name: (kind, kind.sizes(module))
        for name, module in model.named_modules()
        if is_linear_like(module) and (kind := kind_of(module))
    }


def _is_conv1d(module: nn.Module) -> bool:
    # GPT-2's layer, recognised by name: this package does not import transformers.
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
