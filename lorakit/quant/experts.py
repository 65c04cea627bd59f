"""Experts whose weights are quantised: one matrix is dequantised for each product with it, in forward and backward."""

from collections.abc import Mapping
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lorakit.lora.layer_kinds import QuantizedExperts
from lorakit.ops.products import GetWeight, frozen_linear
from lorakit.quant.linear import QuantizationInfo


@final
class QuantExperts(QuantizedExperts):
    """A 3-D parameter of experts in codes, in its place: the forward of their module multiplies by its items.

    transposed: a matrix of the parameter is (in, out), as gpt-oss has it.
    """

    by_onednn = False

    def __init__(self, weight: QuantizationInfo, tensors: Mapping[str, Tensor], *, transposed: bool) -> None:
        super().__init__()
        self.num_values = weight.num_experts * weight.shape[0] * weight.shape[1]
        self.quantization = weight
        self.transposed = transposed
        self.dtype = weight.dtype
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def __getitem__(self, index: Any) -> "LazyMatrix":
        expert = int(index)

        def read() -> Tensor:
            weight = self.quantization
            own = {name: tensor[expert] for name, tensor in self.named_parameters()}
            return weight.scheme.dequantize(own, weight.shape, weight.dtype)

        return LazyMatrix(read, transposed=self.transposed, by_onednn=self.by_onednn)


@final
class LazyMatrix:
    """One expert's matrix, as its module reads it. read: returns W (out, in)."""

    def __init__(self, read: GetWeight, *, transposed: bool, by_onednn: bool) -> None:
        self._read = read
        self._transposed = transposed
        self._by_onednn = by_onednn

    def full(self) -> Tensor:
        return self._read().T if self._transposed else self._read()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        x, M, bias = (*args, None, None)[:3]
        if (func is F.linear or func in MATMUL) and isinstance(M, cls) and not kwargs:
            multiplies_rows = func is F.linear  # x M^T; else x M
            read = M._read if M._transposed != multiplies_rows else lambda: M._read().T
            return frozen_linear(x, read, bias if multiplies_rows else None, by_onednn=M._by_onednn)
        # any other operation gets the matrix itself
        args, kwargs = tree_map(lambda arg: arg.full() if isinstance(arg, cls) else arg, (args, kwargs or {}))
        return func(*args, **kwargs)


MATMUL: Final = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
