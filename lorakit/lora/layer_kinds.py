"""The kinds of layer an adapter can sit on: how to recognise one, its sizes, and its product."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear


@dataclass(frozen=True)
class LayerKind:
    """One kind of linear layer."""

    name: str
    sizes: Callable[[nn.Module], tuple[int, int]]
    """layer -> (out, in), from its attributes: sharded and quantised weights lie about their shape"""
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """(x, stored weight, bias) -> y, bit for bit as a plain layer of this kind computes it"""
    transposed: bool
    """whether the weight is stored as (in, out)"""
    shrink: Callable[[nn.Module, Tensor, Tensor], Tensor]
    """(layer, x, A) -> x A^T: what the first half of a low-rank update is for this kind of layer"""
    run: Callable[[nn.Module, Tensor, Tensor | None], Tensor]
    """(layer, x, bias) -> y: the product with the layer's own weight"""
    dequantized: Callable[[nn.Module], Tensor]
    """layer -> its stored weight as floats"""
    copied_attributes: tuple[str, ...] = ()
    """attributes of the layer that its product, or other code, reads besides its tensors"""


def _linear_sizes(layer: nn.Module) -> tuple[int, int]:
    assert isinstance(layer, nn.Linear)
    return layer.out_features, layer.in_features


def _conv1d_sizes(layer: nn.Module) -> tuple[int, int]:
    return int(layer.nf), int(layer.nx)  # type: ignore[arg-type]


def _conv1d_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    y = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
    return y.view(*x.shape[:-1], weight.shape[-1])


def _embedding_sizes(layer: nn.Module) -> tuple[int, int]:
    assert isinstance(layer, nn.Embedding)
    return layer.embedding_dim, layer.num_embeddings


def _embedding_product(ids: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    assert bias is None
    return F.embedding(ids, weight)


def _shrink_linear(layer: nn.Module, x: Tensor, A: Tensor) -> Tensor:
    return F.linear(x, A.to(x.dtype))


def _shrink_embedding(layer: nn.Module, ids: Tensor, A: Tensor) -> Tensor:
    """Rows of A^T: an embedding is a linear layer on one-hot vectors."""
    return scale_embedding(layer, F.embedding(ids, A.T))


def scale_embedding(layer: nn.Module, rows: Tensor) -> Tensor:
    """Gemma scales what it looks up."""
    scale = getattr(layer, "embed_scale", None)
    return rows if scale is None else rows * torch.as_tensor(scale, dtype=rows.dtype, device=rows.device)


def weight_of(layer: nn.Module) -> Tensor:
    """The stored weight of a layer that stores it as floats."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight


def _run_linear(layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight_of(layer), bias)


def _run_conv1d(layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
    return _conv1d_product(x, weight_of(layer), bias)


def _run_embedding(layer: nn.Module, ids: Tensor, bias: Tensor | None) -> Tensor:
    return scale_embedding(layer, F.embedding(ids, weight_of(layer)))


LINEAR: Final = LayerKind("Linear", _linear_sizes, F.linear, False, _shrink_linear, _run_linear, weight_of)
CONV1D: Final = LayerKind("Conv1D", _conv1d_sizes, _conv1d_product, True, _shrink_linear, _run_conv1d, weight_of)
EMBEDDING: Final = LayerKind(
    "Embedding", _embedding_sizes, _embedding_product, True, _shrink_embedding, _run_embedding, weight_of,
    ("num_embeddings", "embedding_dim", "padding_idx", "embed_scale"),
)  # fmt: skip


class QuantizedLinear(nn.Module):
    """A frozen linear layer whose weight is not stored as floats; ``quant`` says how it is. Subclasses are final."""

    kind: LayerKind
    in_features: int
    out_features: int
    dtype: torch.dtype
    """in which it computes"""
    name: str
    """how it is packed"""


def is_linear_like(module: nn.Module) -> bool:
    """True for what PEFT's ``all-linear`` calls linear: nn.Linear with its subclasses, and transformers' Conv1D."""
    return isinstance(module, nn.Linear | QuantizedLinear) or _is_conv1d(module)


def kind_of(module: nn.Module) -> LayerKind | None:
    """The kind of a layer, or None when its product is not known (a Linear with a forward of its own)."""
    if isinstance(module, QuantizedLinear):
        return module.kind
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return None  # nn.MultiheadAttention reads its weight and never calls it: an adapter would do nothing
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return LINEAR
    return CONV1D if _is_conv1d(module) else None


def adaptable_layers(model: nn.Module) -> dict[str, tuple[LayerKind, tuple[int, int]]]:
    """Every layer a patch can change: module name -> (kind, (out, in)). Works on the meta device."""
    found = {name: kind_of(module) or embedding_of(module) for name, module in model.named_modules()}
    return {name: (kind, kind.sizes(model.get_submodule(name))) for name, kind in found.items() if kind}


def embedding_of(module: nn.Module) -> LayerKind | None:
    """EMBEDDING for an embedding, None for anything else."""
    return EMBEDDING if isinstance(module, nn.Embedding) else None


def trainable_kind(module: nn.Module) -> LayerKind | None:
    """The kind of a layer that an adapter can be trained on: its product must be known to the bit."""
    if not isinstance(module, nn.Embedding):
        return kind_of(module)
    plain = type(module).forward is nn.Embedding.forward or hasattr(module, "embed_scale")
    return EMBEDDING if plain and module.max_norm is None and not module.sparse else None


def _is_conv1d(module: nn.Module) -> bool:
    # GPT-2's layer, recognised by name: this package does not import transformers.
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
