"""The training layer: a frozen linear layer and one adapter, all of them parameters of one module."""

from collections.abc import Mapping
from functools import partial
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorakit.lora.layer_kinds import EMBEDDING, LayerKind
from lorakit.lora.methods import METHODS, LayerInputs
from lorakit.lora.module import AdapterModule
from lorakit.ops.lora_linear import can_fuse, lora_linear


@final
class LoraLinear(AdapterModule):
    """y = x W^T + b + s (dropout(x) A^T) B^T, or the formula of another method. W is the base's own parameter.

    `fused`: compute plain LoRA by `ops.lora_linear` instead of `methods.apply_low_rank`: the same formula, less memory.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        base: nn.Module,
        kind: LayerKind,
        *,
        method: str,
        rank: int,
        alpha: float,
        dropout: float,
        tensors: Mapping[str, Tensor],
    ) -> None:
        super().__init__(base)
        # from the layer's attributes: the shapes of sharded and quantised weights are not (out, in)
        self.out_features, self.in_features = kind.sizes(base)
        self.kind, self.method, self.rank, self.alpha = kind, method, rank, alpha
        self.scale = METHODS[method].scale(alpha, rank)
        self.dropout = nn.Dropout(dropout)
        bias = base._parameters.get("bias")
        self.bias_dtype = None if bias is None else bias.dtype
        for name in kind.copied_attributes:
            if hasattr(base, name):
                setattr(self, name, getattr(base, name))
        self._tensor_names = tuple(tensors)
        # a start at a part of W has A0 and B0 too; an embedding looks rows of A up instead of multiplying
        self.fused = kind is not EMBEDDING and METHODS[method].low_rank and set(tensors) == {"lora_A", "lora_B"}
        fixed = (*METHODS[method].fixed, "lora_A0", "lora_B0")
        self.add_tensors(tensors, fixed=fixed, derived=METHODS[method].derived)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that the method reads, by name."""
        return {name: self.get_parameter(name) for name in self._tensor_names}

    def forward(self, x: Tensor) -> Tensor:
        tensors, weight = self.tensors(), self._parameters.get("weight")
        if self.fused and weight is not None and can_fuse(x, weight):
            return lora_linear(
                x,
                partial(self.kind.dequantized, self),
                _bias_of(self),
                tensors["lora_A"],
                tensors["lora_B"],
                self.scale,
                transposed=self.kind.transposed,
                dropout=self.dropout.p if self.training else 0.0,
            )
        return apply_method(self, x, tensors)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, {self.method}, rank={self.rank}, alpha={self.alpha:g}"


@final
class TiedLoraHead(AdapterModule):
    """An output head that shares its weight with an embedding, adapted by the embedding's own A and B.

    The shared weight E (vocabulary, width) becomes E + s A^T B^T for both. An embedding maps one-hot vectors to rows,
    so its A is (r, vocabulary) and its B (width, r).
    """

    def __init__(self, head: nn.Module, embedding: LoraLinear, dropout: float) -> None:
        super().__init__(head)
        self.out_features, self.in_features = embedding.in_features, embedding.out_features
        self.scale, self.dropout = embedding.scale, nn.Dropout(dropout)
        self.register_parameter("lora_A", embedding.get_parameter("lora_A"))
        self.register_parameter("lora_B", embedding.get_parameter("lora_B"))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.get_parameter("weight"), self._parameters.get("bias"))
        A, B = (self.get_parameter(name).to(x.dtype) for name in ("lora_A", "lora_B"))
        return torch.add(y, F.linear(F.linear(self.dropout(x), B.T), A.T), alpha=self.scale)


def apply_method(layer: LoraLinear, x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the adapted layer's output for x by its method's `apply`, in plain operations."""
    kind, bias = layer.kind, _bias_of(layer)
    y = kind.run(layer, x, bias)
    has_dropout = layer.training and layer.dropout.p > 0 and x.is_floating_point()  # an embedding's x is token ids
    dropped = layer.dropout(x) if has_dropout else x

    def product() -> Tensor:
        if has_dropout:
            return kind.run(layer, dropped, None)
        return y if bias is None else y - bias

    def weight_times(A: Tensor) -> Tensor:
        W = kind.dequantized(layer)
        return (A.to(W.dtype) @ (W if kind.transposed else W.T)).T

    inputs = LayerInputs(
        y,
        product,
        shrink=lambda A: kind.shrink(layer, dropped, A),
        shrink_without_dropout=lambda A: kind.shrink(layer, x, A),
        weight_times=weight_times,
    )
    return METHODS[layer.method].apply(inputs, tensors, layer.scale)


def _bias_of(layer: LoraLinear) -> Tensor | None:
    """Return the bias in the base's dtype, which a trainable bias, a float32 master, has not."""
    bias = layer._parameters.get("bias")
    return bias if bias is None or layer.bias_dtype is None else bias.to(layer.bias_dtype)


def use_plain_lora(model: nn.Module) -> None:
    """Let all adapted layers compute in plain operations, which torch.compile can fuse itself."""
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.fused = False
