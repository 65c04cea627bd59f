"""The training layer: a frozen linear layer and one adapter, all of them parameters of one module."""

from collections.abc import Mapping
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorakit.lora.layer_inputs import LayerInputs
from lorakit.lora.layer_kinds import LayerKind
from lorakit.lora.methods import METHODS
from lorakit.lora.module import AdapterModule
from lorakit.ops.dropout import dropout_mask
from lorakit.ops.tensor_parallel import WeightGroup
from lorakit.ops.token_parts import BlockInput


@final
class LoraLinear(AdapterModule):
    """y = x W^T + b + s (dropout(x) A^T) B^T, or the formula of another method. W is the base's own parameter.

    `name`: the layer's name in the model, of which its dropout mask is a function.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        base: nn.Module,
        kind: LayerKind,
        *,
        name: str = "",
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
        self.dropout, self.name = dropout, name
        self.first_column = 0  # of x in the layer's full input, where ranks have parts of it
        self.block_input: BlockInput | None = None  # of which x is, where ranks share the block
        self.column_ranks: WeightGroup | None = None  # that have the other columns of W and A
        self.has_bias = True  # False where another rank adds it to the sum
        bias = base._parameters.get("bias")
        self.bias_dtype = None if bias is None else bias.dtype
        for name in kind.copied_attributes:
            if hasattr(base, name):
                setattr(self, name, getattr(base, name))
        self._tensor_names = tuple(tensors)
        fixed = (*METHODS[method].fixed, "lora_A0", "lora_B0")
        self.add_tensors(tensors, fixed=fixed, derived=METHODS[method].derived)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that the method reads, by name."""
        return {name: self.get_parameter(name) for name in self._tensor_names}

    def forward(self, x: Tensor) -> Tensor:
        method, inputs, tensors = METHODS[self.method], self.inputs(x), self.tensors()
        y = method.fused(inputs, tensors, self.scale) if method.fused is not None else None
        return method.apply(inputs, tensors, self.scale) if y is None else y

    def inputs(self, x: Tensor) -> LayerInputs:
        """Return what the method reads in a forward pass on x."""
        has_dropout = self.dropout > 0 and self.training and x.is_floating_point()  # an embedding's x is token ids
        mask = dropout_mask(x, self.dropout, self.name, self.first_column) if has_dropout else None
        left = None if self.block_input is None else self.block_input.left_by(x, self.get_parameter("lora_A"))
        return LayerInputs(self, self.kind, x, self._bias(), mask, left, self.column_ranks)

    def _bias(self) -> Tensor | None:
        """Return the bias in the base's dtype, which a trainable bias, a float32 master, has not."""
        bias = self._parameters.get("bias")
        if bias is not None and not self.has_bias:
            return bias.to(self.bias_dtype) * 0  # and not None, so that its gradient is 0 and not missing
        return bias if bias is None or self.bias_dtype is None else bias.to(self.bias_dtype)

    def extra_repr(self) -> str:
        dropout = f", dropout={self.dropout:g}" if self.dropout else ""
        return (
            f"{self.in_features} -> {self.out_features}, {self.method}, rank={self.rank}, alpha={self.alpha:g}{dropout}"
        )


@final
class TiedLoraHead(AdapterModule):
    """An output head that shares its weight with an embedding, adapted by the embedding's own A and B.

    The shared weight E (vocabulary, width) becomes E + s A^T B^T for both. An embedding maps one-hot vectors to rows,
    so its A is (r, vocabulary) and its B (width, r).
    """

    def __init__(self, head: nn.Module, embedding: LoraLinear, dropout: float, name: str) -> None:
        super().__init__(head)
        self.out_features, self.in_features = embedding.in_features, embedding.out_features
        self.scale, self.dropout, self.name = embedding.scale, dropout, name
        self.register_parameter("lora_A", embedding.get_parameter("lora_A"))
        self.register_parameter("lora_B", embedding.get_parameter("lora_B"))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.get_parameter("weight"), self._parameters.get("bias"))
        A, B = (self.get_parameter(name).to(x.dtype) for name in ("lora_A", "lora_B"))
        if self.dropout > 0 and self.training:
            x = dropout_mask(x, self.dropout, self.name).apply(x)
        return torch.add(y, F.linear(F.linear(x, B.T), A.T), alpha=self.scale)
