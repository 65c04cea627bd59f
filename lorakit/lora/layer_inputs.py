"""One forward pass of an adapted layer, as the formulas of `lora.methods` read it."""

from dataclasses import dataclass

from torch import Tensor, nn

from lorakit.lora.layer_kinds import LayerKind
from lorakit.ops.dropout import DrawnMask, DropoutMask
from lorakit.ops.tensor_parallel import WeightGroup
from lorakit.ops.token_parts import LeftProducts


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """What a method may read. x' is x after dropout."""

    layer: nn.Module
    """holds W, perhaps quantised"""
    kind: LayerKind
    x: Tensor
    """(..., in); token ids for an embedding"""
    bias: Tensor | None
    mask: DropoutMask | DrawnMask | None = None
    """the zeros of x'; None: x' is x"""
    left: LeftProducts | None = None
    """of the gather that returned x and computes A's gradient"""
    column_ranks: WeightGroup | None = None
    """the ranks that have the other columns of W and A; None: all are here"""

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

    def over_columns(self, partial: Tensor) -> Tensor:
        """Return the sum over all columns of W, of a sum over those that are here."""
        return partial if self.column_ranks is None else self.column_ranks.sum(partial)

    def weight_times(self, A: Tensor) -> Tensor:
        """Return W A^T, (out, r)."""
        W = self.kind.dequantized(self.layer)
        return (A.to(W.dtype) @ (W if self.kind.transposed else W.T)).T
