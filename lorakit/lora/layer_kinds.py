"""The kinds of layer that an adapter can sit on: how to recognise one, its sizes, and its product."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear


def weight_of(layer: nn.Module) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight


@dataclass(frozen=True, eq=False)
class LayerKind:
    """One kind of linear layer: W (out, in) whatever its stored weight looks like. Nothing elsewhere compares kinds."""

    name: str
    sizes: Callable[[nn.Module], tuple[int, int]]
    """layer -> (out, in), from its attributes, because sharded and quantised weights have other shapes"""
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """(x, stored weight, bias) -> y, with the bits of a plain layer of this kind"""
    stored_axis: Literal["out", "in"] = "out"
    """the axis of W that the rows of the stored weight run over; "in": the weight is stored transposed, as (in, out)"""
    dequantized: Callable[[nn.Module], Tensor] = weight_of  # layer -> its stored weight as floats
    quantized_product: Callable[[nn.Module, Tensor, Tensor | None], Tensor] | None = None
    """(layer, x, bias) -> y without the dequantised weight in memory until backward; None for weights of floats"""
    copied_attributes: tuple[str, ...] = ()
    """attributes of a layer, besides its tensors, that its product or a model's other code reads"""
    takes_ids: bool = False  # True if x is token ids, which stand for one-hot vectors

    def run(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return y, the product with the layer's own weight."""
        if self.quantized_product is not None:
            return self.quantized_product(layer, x, bias)
        return scale_embedding(layer, self.product(x, self.dequantized(layer), bias))

    def shrink(self, layer: nn.Module, x: Tensor, A: Tensor) -> Tensor:
        """Return x A^T, the first half of a low-rank update: for token ids, rows of A^T."""
        return scale_embedding(layer, F.embedding(x, A.T)) if self.takes_ids else F.linear(x, A.to(x.dtype))

    def matrix(self, stored: Tensor) -> Tensor:
        """Return W (out, in) as a view of the stored weight; or the stored weight as a view of W."""
        return stored if self.stored_axis == "out" else stored.T

    def read(self, layer: nn.Module) -> Tensor:
        """Return W (out, in) of a layer as floats."""
        return self.matrix(self.dequantized(layer))

    def stored_shape(self, sizes: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of the stored weight of a layer. sizes: (out, in)."""
        return sizes if self.stored_axis == "out" else sizes[::-1]


def scale_embedding(layer: nn.Module, rows: Tensor) -> Tensor:
    """Return a layer's outputs, scaled where it is an embedding that scales its rows (Gemma's `embed_scale`)."""
    scale = getattr(layer, "embed_scale", None)
    return rows if scale is None else rows * torch.as_tensor(scale, dtype=rows.dtype, device=rows.device)


def _conv1d_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    y = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
    return y.view(*x.shape[:-1], weight.shape[-1])


LINEAR: Final = LayerKind("Linear", attrgetter("out_features", "in_features"), F.linear)
CONV1D: Final = LayerKind("Conv1D", attrgetter("nf", "nx"), _conv1d_product, stored_axis="in")
EMBEDDING: Final = LayerKind(
    "Embedding",
    attrgetter("embedding_dim", "num_embeddings"),
    lambda ids, weight, bias: F.embedding(ids, weight),
    stored_axis="in",
    copied_attributes=("num_embeddings", "embedding_dim", "padding_idx", "embed_scale"),
    takes_ids=True,
)
PEFT_NAMES: Final = {
    False: {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight"},
    True: {"lora_A": "lora_embedding_A", "lora_B": "lora_embedding_B"},
}
"""`takes_ids` of the layer -> factor -> the end of its key in PEFT's files"""


def expert_kind(module: nn.Module) -> LayerKind:
    """Return the kind of the matrices of a module of experts. PEFT reads the same attribute."""
    return CONV1D if getattr(module, "is_transposed", False) else LINEAR


def fan_in_fan_out(kinds: Iterable[LayerKind]) -> bool:
    """Return PEFT's setting of this name: True if all of these layers but embeddings store W transposed."""
    matrices = [kind for kind in kinds if not kind.takes_ids]
    return bool(matrices) and all(kind.stored_axis == "in" for kind in matrices)


class QuantizedLinear(nn.Module):
    """A frozen linear layer with a quantised weight, defined in `quant`. Subclasses are final."""

    kind: LayerKind
    in_features: int
    out_features: int
    dtype: torch.dtype  # dtype of its product


IN_CODES: Final = "the files hold its experts quantised; `lorakit merge BASE --out FOLDER` writes the base in floats"


class QuantizedExperts(nn.Module):
    """Frozen experts with quantised weights, in place of a 3-D parameter, defined in `quant`. Subclasses are final."""

    num_values: int  # of all matrices, as floats


def is_linear_like(module: nn.Module) -> bool:
    """True for the layers that PEFT's ``all-linear`` means: nn.Linear with its subclasses, and transformers' Conv1D."""
    return isinstance(module, nn.Linear | QuantizedLinear) or _is_conv1d(module)


def kind_of(module: nn.Module) -> LayerKind | None:
    """Return the kind of a linear layer; None if its product is unknown (a Linear with a forward of its own)."""
    if isinstance(module, QuantizedLinear):
        return module.kind
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return None  # nn.MultiheadAttention reads its weight and never calls it: an adapter would do nothing
    if isinstance(module, nn.Linear) and _multiplies(type(module).forward):
        return LINEAR
    return CONV1D if _is_conv1d(module) else None


@cache
def _multiplies(forward: Callable[..., Any]) -> bool:
    """True if a layer's forward is x W^T + b and nothing else: nn.Linear's, and those that say it in other words."""
    if forward is nn.Linear.forward:
        return True
    # small whole numbers, whose products are exact in any order
    x, weight, bias = (torch.tensor(values, device="cpu") for values in ([[1.0, -2.0, 3.0]], [[2.0, 1.0, -1.0]], [5.0]))
    try:  # on tensors alone, so that a class that reads anything else of its module fails
        return all(
            torch.equal(forward(SimpleNamespace(weight=weight, bias=one), x), F.linear(x, weight, one))
            for one in (None, bias)
        )
    except (AttributeError, TypeError, RuntimeError):
        return False


def stored_kind(module: nn.Module) -> LayerKind | None:
    """Return the kind of a layer whose weight a patch can change, whatever the layer's forward; None for others."""
    return EMBEDDING if isinstance(module, nn.Embedding) else kind_of(module)


def trainable_kind(module: nn.Module) -> LayerKind | None:
    """Return the kind of a layer that an adapter can be trained on; None if its product is not known to the bit."""
    if not isinstance(module, nn.Embedding):
        return kind_of(module)
    is_known = type(module).forward is nn.Embedding.forward or hasattr(module, "embed_scale")
    # max_norm rewrites rows in every forward, and a sparse gradient belongs to the layer's own weight
    return EMBEDDING if is_known and module.max_norm is None and not module.sparse else None


def _is_conv1d(module: nn.Module) -> bool:
    # GPT-2's layer, recognised by name, because this package does not import transformers
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


Experts = tuple[LayerKind, tuple[int, int, int]]  # of a 3-D parameter: kind of one matrix, (experts, out, in)


def expert_parameters(model: nn.Module) -> Iterator[tuple[str, Experts]]:
    """Yield every 3-D parameter with one matrix for each expert, by name."""
    for name, module in model.named_modules():
        for key, tensor in module.named_parameters(recurse=False):
            is_experts = "expert" in name.rpartition(".")[2].lower() or hasattr(module, "num_experts")
            if tensor.dim() == 3 and min(tensor.shape[1:]) > 1 and is_experts:
                kind = expert_kind(module)
                yield f"{name}.{key}", (kind, (len(tensor), *kind.stored_shape((tensor.shape[1], tensor.shape[2]))))


def patched_parameters(model: nn.Module) -> Iterator[tuple[str, Experts]]:
    """Yield every parameter of experts, and of routers as of one expert: ``all-linear`` takes both."""
    yield from expert_parameters(model)
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")  # of a router, (experts, width)
        is_router = "Router" in type(module).__name__ and not is_linear_like(module)
        if is_router and weight is not None and weight.dim() == 2:
            yield f"{name}.weight", (LINEAR, (1, weight.shape[0], weight.shape[1]))
