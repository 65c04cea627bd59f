"""The training layer: a frozen linear layer and one adapter, all of them parameters of one module.

A and B are direct parameters (not child modules): sharding engines gather a module's own parameters before its
forward. The base's tensors keep their names, so ``q_proj.weight`` is still ``q_proj.weight``.
"""

from typing import final

from torch import Tensor, nn

from lorakit.lora.kinds import Kind
from lorakit.lora.methods import METHODS


@final
class LoraLinear(nn.Module):
    """y = x W^T + b + s (dropout(x) A^T) B^T. W and b belong to the base and are never written.

    The adapter's tensors are float32 masters; they are cast to x's dtype in the forward pass.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, base: nn.Module, kind: Kind, *, method: str, rank: int, alpha: float, dropout: float,
        tensors: dict[str, Tensor],
    ) -> None:  # fmt: skip
        super().__init__()
        self.out_features, self.in_features = kind.sizes(base)
        self.kind, self.method, self.rank, self.alpha = kind, method, rank, alpha
        self.scale = METHODS[method].scale(alpha, rank)
        self.dropout = nn.Dropout(dropout)
        self.register_parameter("weight", base.weight)  # type: ignore[arg-type]
        self.register_parameter("bias", base.bias)  # type: ignore[arg-type]
        self.tensor_names = tuple(tensors)
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))
        self.train(base.training)

    def adapter_tensors(self) -> dict[str, nn.Parameter]:
        """The trainable tensors by name, looked up now: engines replace parameter objects."""
        return {name: self.get_parameter(name) for name in self.tensor_names}

    def forward(self, x: Tensor) -> Tensor:
        y = self.kind.product(x, self.weight, self.bias)
        return METHODS[self.method].apply(self.dropout(x), y, self.adapter_tensors(), self.scale)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, {self.method}, rank={self.rank}, alpha={self.alpha:g}"
