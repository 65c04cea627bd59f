"""One forward call of an adapted layer, as the formulas of `lora.methods` read it."""

from dataclasses import dataclass

from torch import Tensor, nn

from lorakit.lora.layer_kinds import LayerKind
from lorakit.ops.dropout import DrawnMask, DropoutMask


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One forward call of an adapted layer. x' is x after dropout."""

    layer: nn.Module
    """holds W, perhaps quantised"""
    kind: LayerKind
    x: Tensor
    """(..., in); token ids for an embedding"""
    bias: Tensor | None
    mask: DropoutMask | DrawnMask | None = None
    """the zeros of x'; None: x' is x"""

    def y(self) -> Tensor:
        """Return x W^T + b, (..., out)."""
        return self.kind.run(self.layer, self.x, self.bias)

    def dropped(self) -> Tensor:
        """Return x'."""
        return self.x if self.mask is None else self.mask.apply(self.x)

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x W^T without b, for x or x'. `y`: of `self.y()`, from which the product of x is known."""
        if x is not self.x:
            return self.kind.run(self.layer, x, None)
        return y if self.bias is None else y - self.bias

    def shrink(self, x: Tensor, A: Tensor) -> Tensor:
        """Return x A^T, (..., r), for x or x'."""
        return self.kind.shrink(self.layer, x, A)

    def change_of_squared_norms(self, A: Tensor, B: Tensor, s: float) -> Tensor:
        """Return |W + s B A|^2 - |W|^2 of each row, (out,): 2 s (W A^T . B) + s^2 (B A A^T . B). A, B: float32."""
        W = self.kind.read(self.layer)
        inner = ((A.to(W.dtype) @ W.T).T.float() * B).sum(1)
        squares = ((B @ (A @ A.T)) * B).sum(1)
        return 2 * s * inner + s * s * squares
