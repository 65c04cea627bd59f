"""llama.cpp's blocks: values of a row, 32 or 256 at a time, in 2 to 8 bits with scales, as they are in GGUF files."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from lorakit.errors import BaseModelError
from lorakit.ops._internals import gguf_formulas
from lorakit.quant.schemes import QuantScheme, Shapes


@final
@dataclass(frozen=True)
class GgufBlocks(QuantScheme):
    """Blocks of one type, by its number in ggml.h. Their values are transformers' in torch, computed in float32."""

    ggml_type: int = 12  # Q4_K

    def shapes(self, out_features: int, in_features: int) -> Shapes:
        values, num_bytes = gguf_formulas().GGML_BLOCK[self.ggml_type]
        return {"weight": ((out_features, in_features // values * num_bytes), torch.uint8)}

    def dequantize(self, tensors: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        values: Tensor = gguf_formulas().dequantize(tensors["weight"].reshape(-1), self.ggml_type, torch.float32)
        return values.view(shape).to(dtype)

    def stored_names(self, weight: str) -> dict[str, str]:
        return {"weight": weight}

    def num_columns(self, num_bytes: int) -> int:
        """Return the number of values in so many bytes of a row."""
        values, size = gguf_formulas().GGML_BLOCK[self.ggml_type]
        return int(num_bytes // size * values)


def gguf_schemes(config: Mapping[str, Any]) -> dict[str, GgufBlocks]:
    """Return module -> scheme of a quantization_config. Raises BaseModelError: a damaged one."""
    types = config.get("types")
    known = gguf_formulas().GGML_BLOCK
    if not (isinstance(types, dict) and types and all(type(one) is int and one in known for one in types.values())):
        raise BaseModelError("quantization_config: types: a number of ggml.h for each layer expected")
    return {module: GgufBlocks("gguf", ggml_type=number) for module, number in types.items()}
