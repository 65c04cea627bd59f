"""How weights are quantised: one class for each layout.

A new scheme is a class with these methods and its row in published.py; nothing else compares names. Sources: Dettmers
et al. 2023 (arXiv 2305.14314) for nf4 and double quantisation, 2022 (arXiv 2208.07339) for int8 by rows.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Final, final

import torch
from torch import Tensor

from lorakit.errors import BaseModelError
from lorakit.ops._internals import gguf_formulas
from lorakit.quant.bnb import bitsandbytes

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]  # name of a tensor -> its shape and dtype
CPU: Final = torch.device("cpu")


@dataclass(frozen=True)
class QuantScheme(ABC):
    """A layout of quantised weights. Subclasses are final."""

    name: str
    double_quant: bool = False  # True if the scales of the blocks are quantised too, to 8 bits
    block: ClassVar[int | None] = None  # number of values of a row that share a scale; None: a full row

    @abstractmethod
    def shapes(self, out_features: int, in_features: int) -> Shapes:
        """Return the tensors of a quantised weight (out, in)."""

    def stored_shapes(self, out_features: int, in_features: int) -> Shapes:
        """Return the tensors of a weight in a file, by the keys of `stored_names`."""
        return self.shapes(out_features, in_features)

    def quantize(self, W: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a weight (out, in), with the bits of bitsandbytes, of `fp8` of compressed-tensors."""
        raise NotImplementedError(f"{self.name} is read from files")

    @abstractmethod
    def dequantize(self, tensors: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the weight (out, in) in ``dtype`` from its quantised tensors."""

    def working_bytes(self, num_values: int) -> int:
        """Return the memory that is used while a weight is quantised, beside the weight and the result."""
        return 0

    @abstractmethod
    def stored_names(self, weight: str) -> dict[str, str]:
        """Return tensor of a quantised weight, as ``shapes`` names it -> its name in bitsandbytes' files."""

    def code_tables(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return the values that the codes stand for: of weights, then of scales; none if codes are numbers."""
        return ()

    def stored_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors as ``dequantize`` takes them, from those of a file."""
        return tensors

    def __str__(self) -> str:
        return self.name + (" with quantised scales" if self.double_quant else "")


@final
@dataclass(frozen=True)
class FourBitBlocks(QuantScheme):
    """Codes of 4 bits, two in a byte, with a scale for each block of 64 values."""

    block: ClassVar[int] = 64
    NESTED_BLOCK = 256
    PIECE_ELEMENTS = 1 << 18
    """values quantised at a time, because on a CPU bitsandbytes takes WORKING_BYTES of memory for each"""
    WORKING_BYTES = 64

    def shapes(self, out_features: int, in_features: int) -> Shapes:
        size = out_features * in_features
        num_blocks = math.ceil(size / self.block)
        weight: Shapes = {"weight": ((math.ceil(size / 2),), torch.uint8)}
        if not self.double_quant:
            return weight | {"block_scale": ((num_blocks,), torch.float32)}
        return weight | {
            "block_scale": ((num_blocks,), torch.uint8),
            "nested_scale": ((math.ceil(num_blocks / self.NESTED_BLOCK),), torch.float32),
            "offset": ((1,), torch.float32),
        }

    def quantize(self, W: Tensor) -> dict[str, Tensor]:
        bnb = bitsandbytes().functional
        pieces = W.detach().contiguous().view(-1).split(self.PIECE_ELEMENTS)
        parts = [bnb.quantize_4bit(piece, blocksize=self.block, quant_type=self.name) for piece in pieces]
        weight = torch.cat([part.view(-1) for part, _ in parts])
        scale = torch.cat([state.absmax for _, state in parts])
        if not self.double_quant:
            return {"weight": weight, "block_scale": scale}
        # over all blocks at once, because the offset is the mean of the scales of the full weight
        offset = scale.mean()
        block_scale, state = bnb.quantize_blockwise(scale - offset, blocksize=self.NESTED_BLOCK)
        return {"weight": weight, "block_scale": block_scale, "nested_scale": state.absmax, "offset": offset.view(1)}

    def dequantize(self, tensors: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        weight = tensors["weight"]
        bnb = bitsandbytes().functional
        codes, scale_codes = self.code_tables(weight.device)
        nested = {}
        if self.double_quant:
            settings = {"code": scale_codes, "blocksize": self.NESTED_BLOCK, "dtype": torch.float32}
            scales = bnb.QuantState(tensors["nested_scale"], **settings)
            nested = {"offset": tensors["offset"].view(()), "state2": scales}
        layout = {"shape": torch.Size(shape), "blocksize": self.block, "quant_type": self.name, "dtype": dtype}
        state = bnb.QuantState(tensors["block_scale"], code=codes, **layout, **nested)
        return bnb.dequantize_4bit(weight.view(-1, 1), state)

    def working_bytes(self, num_values: int) -> int:
        return self.WORKING_BYTES * min(num_values, self.PIECE_ELEMENTS)

    def stored_names(self, weight: str) -> dict[str, str]:
        names = {"weight": weight, "block_scale": f"{weight}.absmax"}
        return names | {"nested_scale": f"{weight}.nested_absmax"} if self.double_quant else names

    def stored_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        # bytes, because transformers may store the codes in another dtype (bnb_4bit_quant_storage)
        return {**tensors, "weight": tensors["weight"].view(torch.uint8).reshape(-1)}

    def code_tables(self, device: torch.device) -> tuple[Tensor, ...]:
        return _code_tables(self.name, device)

    @classmethod
    def of_state(cls, state: bytes) -> "tuple[FourBitBlocks, tuple[int, int], float | None] | str":
        """Return scheme, (out, in) and the scales' offset from a weight's record in a file; or what is wrong."""
        record = json.loads(state)
        name = record["quant_type"]
        block = record["blocksize"]
        nested = record.get("nested_blocksize")
        out_features, in_features = (int(size) for size in record["shape"])
        is_known = name in ("nf4", "fp4") and block == cls.block and nested in (None, cls.NESTED_BLOCK)
        if not is_known or min(out_features, in_features) < 1:
            return f"{name} in blocks of {block} ({nested} of scales); lorakit reads {cls.block} ({cls.NESTED_BLOCK})"
        offset = None if nested is None else float(record.get("nested_offset", 0.0))
        return cls(name, nested is not None), (out_features, in_features), offset


@lru_cache(maxsize=8)
def _code_tables(name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    bnb = bitsandbytes().functional
    return bnb.get_4bit_type(name, device=device), bnb.create_dynamic_map().to(device)


@final
@dataclass(frozen=True)
class Int8Rows(QuantScheme):
    """Integers of 8 bits, with a scale for each row."""

    def shapes(self, out_features: int, in_features: int) -> Shapes:
        return {"weight": ((out_features, in_features), torch.int8), "row_scale": ((out_features,), torch.float32)}

    def quantize(self, W: Tensor) -> dict[str, Tensor]:
        half = W.detach().contiguous().to(torch.float16)
        weight, scale, _ = bitsandbytes().functional.int8_vectorwise_quant(half)
        return {"weight": weight, "row_scale": scale}

    def dequantize(self, tensors: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return bitsandbytes().functional.int8_vectorwise_dequant(tensors["weight"], tensors["row_scale"]).to(dtype)

    def working_bytes(self, num_values: int) -> int:
        return 10 * num_values  # for each value: one float16, and two products in float32

    def stored_names(self, weight: str) -> dict[str, str]:
        return {"weight": weight, "row_scale": f"{weight.removesuffix('weight')}SCB"}


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
