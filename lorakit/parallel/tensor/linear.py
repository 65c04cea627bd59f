"""An adapted layer of which this rank has some columns of W and A."""

from dataclasses import dataclass, field, replace
from typing import final

from torch import Tensor, nn

from lorakit.lora import LoraLinear
from lorakit.lora.layer_call import LayerCall
from lorakit.ops.dropout import DrawnMask, DropoutMask, column_keys
from lorakit.parallel.tensor.weight_group import WeightGroup


@final
class TensorParallelLoraLinear(LoraLinear):
    """A layer that is cut by inputs: y is a partial sum, which a hook of the layer adds up over the ranks.

    A layer that is cut by outputs computes as a full layer does, so it stays a `LoraLinear`.
    """

    def __init__(self, layer: LoraLinear, group: WeightGroup) -> None:
        """Take over the attributes of a layer, whose parameters are cut already. group: ranks with other columns."""
        nn.Module.__init__(self)
        self.__dict__.update(layer.__dict__)
        self._group = group
        self._columns = group.part(layer.in_features)
        self.adds_bias = True
        """False where another rank adds the bias to the sum"""

    def inputs(self, x: Tensor) -> LayerCall:
        call = super().inputs(x)
        return _PartialCall(**vars(call), group=self._group)

    def mask_of(self, x: Tensor) -> DropoutMask | DrawnMask:
        mask = super().mask_of(x)
        if isinstance(mask, DrawnMask):
            return mask
        return replace(mask, column_keys=column_keys(self.name, self._columns, x.device))

    def cast_bias(self) -> Tensor | None:
        bias = super().cast_bias()
        # times zero and not None, so that a trainable bias has a gradient of zero and not none
        return bias if bias is None or self.adds_bias else bias * 0


@dataclass(frozen=True, eq=False)
class _PartialCall(LayerCall):
    group: WeightGroup = field(kw_only=True)

    def change_of_squared_norms(self, A: Tensor, B: Tensor, s: float) -> Tensor:
        return self.group.sum(super().change_of_squared_norms(A, B, s))
