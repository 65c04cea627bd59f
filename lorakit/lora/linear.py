"""The training layer: a frozen linear layer and one adapter, all of them parameters of one module."""

from collections.abc import Mapping

from torch import Tensor, nn

from lorakit.lora.methods import METHODS, STARTS, LayerCall
from lorakit.lora.module import AdapterModule
from lorakit.lora.targets import Target
from lorakit.ops.dropout import dropout_mask


class LoraLinear(AdapterModule):
    """y = x W^T + b + s (dropout(x) A^T) B^T, or another method's formula. W is the base's own parameter."""

    bias: nn.Parameter | None
    by_onednn = False  # multiplies by W with oneDNN where it can (`ops.products`)

    def __init__(
        self, base: nn.Module, target: Target, *, method: str, dropout: float, tensors: Mapping[str, Tensor]
    ) -> None:
        super().__init__(base)
        self.out_features = target.out_features
        self.in_features = target.in_features
        self.kind = target.kind
        self.method = method
        self.rank = target.rank
        self.alpha = target.alpha
        self.scale = METHODS[method].scale(target.alpha, target.rank)
        self.dropout = dropout
        self.name = target.name
        for name in target.kind.copied_attributes:
            if hasattr(base, name):
                setattr(self, name, getattr(base, name))
        self._tensor_names = tuple(tensors)
        kinds = {**METHODS[method].tensors, **STARTS}
        for name, tensor in tensors.items():
            self.add_tensor(name, tensor, trainable=kinds[name].trainable, stored=kinds[name].stored)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that the method reads, by name."""
        return {name: self.get_parameter(name) for name in self._tensor_names}

    def forward(self, x: Tensor) -> Tensor:
        method = METHODS[self.method]
        call = self.inputs(x)
        tensors = self.tensors()
        y = method.fused(call, tensors, self.scale) if method.fused is not None else None
        return method.apply(call, tensors, self.scale) if y is None else y

    def inputs(self, x: Tensor) -> LayerCall:
        """Return this call of the layer, as the method reads it."""
        own = self._parameters.get("bias")
        bias = None if own is None else own.to(self._dtypes["bias"])  # a trainable bias is a float32 master
        has_dropout = self.dropout > 0 and self.training and x.is_floating_point()  # an embedding's x is token ids
        mask = dropout_mask(x, self.dropout, self.name) if has_dropout else None
        return LayerCall(self, self.kind, x, bias, mask)
