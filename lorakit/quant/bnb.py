"""Quantise weights to 4 and 8 bits, and build 8-bit optimizers; the only importer of bitsandbytes.

A quantised layer computes y = x W^T with W dequantised for each product, in forward and backward alike. So training on
a quantised base equals training on the dequantised weights. Sources: Dettmers et al. 2023 (arXiv 2305.14314) for nf4
and double quantisation, Dettmers et al. 2022 (arXiv 2208.07339) for int8 by rows.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorakit.errors import RunError
from lorakit.lora.layer_kinds import LINEAR, LayerKind, QuantizedLinear

FOUR_BITS: Final = ("nf4", "fp4")
SCHEMES: Final = (*FOUR_BITS, "int8")
BLOCK: Final = 64
NESTED_BLOCK: Final = 256
PIECE_ELEMENTS: Final = 1 << 18  # because on a CPU bitsandbytes takes 64 bytes of memory per value it quantises
INSTALL: Final = "install it with `pip install 'lorakit[quant]'`"
OPTIMIZERS: Final = {
    "adamw8bit": "AdamW8bit", "paged_adamw8bit": "PagedAdamW8bit", "paged_adamw": "PagedAdamW", "lion": "Lion",
}  # fmt: skip
"""name in recipes -> class of bitsandbytes"""


@dataclass(frozen=True)
class QuantScheme:
    """How weights are quantised: ``nf4`` or ``fp4`` in blocks of 64 values, ``int8`` by rows."""

    name: str
    double_quant: bool = False
    """True if the scales of the blocks are quantised too, to 8 bits"""

    def shapes(self, out_features: int, in_features: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return name -> (shape, dtype) of the tensors of a quantised weight (out, in)."""
        if self.name == "int8":
            return {"weight": ((out_features, in_features), torch.int8), "row_scale": ((out_features,), torch.float32)}
        size = out_features * in_features
        num_blocks = math.ceil(size / BLOCK)
        # two 4-bit codes in each byte
        weight: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"weight": ((math.ceil(size / 2),), torch.uint8)}
        if not self.double_quant:
            return weight | {"block_scale": ((num_blocks,), torch.float32)}
        return weight | {
            "block_scale": ((num_blocks,), torch.uint8),
            "nested_scale": ((math.ceil(num_blocks / NESTED_BLOCK),), torch.float32),
            "offset": ((1,), torch.float32),
        }

    def num_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of a quantised weight with its scales."""
        return sum(
            math.prod(shape) * dtype.itemsize for shape, dtype in self.shapes(out_features, in_features).values()
        )


def quantize(W: Tensor, scheme: QuantScheme) -> dict[str, Tensor]:
    """Return the tensors of a weight (out, in) quantised with the same bits as bitsandbytes' own layers."""
    bnb = bitsandbytes().functional
    W = W.detach().contiguous()
    if scheme.name == "int8":
        weight, scale, _ = bnb.int8_vectorwise_quant(W.to(torch.float16))
        return {"weight": weight, "row_scale": scale}
    pieces = W.view(-1).split(PIECE_ELEMENTS)
    parts = [bnb.quantize_4bit(piece, blocksize=BLOCK, quant_type=scheme.name) for piece in pieces]
    weight, scale = torch.cat([part.view(-1) for part, _ in parts]), torch.cat([state.absmax for _, state in parts])
    if not scheme.double_quant:
        return {"weight": weight, "block_scale": scale}
    # over all blocks at once, because the offset is the mean of the scales of the full weight
    offset = scale.mean()
    block_scale, state = bnb.quantize_blockwise(scale - offset, blocksize=NESTED_BLOCK)
    return {
        "weight": weight, "block_scale": block_scale, "nested_scale": state.absmax, "offset": offset.view(1),
    }  # fmt: skip


def dequantize(
    tensors: Mapping[str, Tensor | None], scheme: QuantScheme, shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Return the weight (out, in) in ``dtype`` from its quantised tensors."""
    weight, bnb = tensors["weight"], bitsandbytes().functional
    assert weight is not None
    if scheme.name == "int8":
        by_rows: Tensor = bnb.int8_vectorwise_dequant(weight, tensors["row_scale"]).to(dtype)
        return by_rows
    codes, nested_codes = code_tables(scheme.name, weight.device)
    nested, offset = None, None
    if scheme.double_quant:
        nested = bnb.QuantState(
            tensors["nested_scale"], code=nested_codes, blocksize=NESTED_BLOCK, dtype=torch.float32
        )  # fmt: skip
        offset = tensors["offset"]
    state = bnb.QuantState(
        tensors["block_scale"], shape=torch.Size(shape), code=codes, blocksize=BLOCK, quant_type=scheme.name,
        dtype=dtype, offset=None if offset is None else offset.view(()), state2=nested,
    )  # fmt: skip
    by_blocks: Tensor = bnb.dequantize_4bit(weight.view(-1, 1), state)
    return by_blocks


def block_scales(tensors: Mapping[str, Tensor], scheme: QuantScheme) -> Tensor:
    """Return the float32 scales of the blocks of a 4-bit weight, as `dequantize` computes with them."""
    if not scheme.double_quant:
        return tensors["block_scale"]
    bnb, scales = bitsandbytes().functional, tensors["block_scale"]
    _, codes = code_tables(scheme.name, scales.device)
    nested = bnb.QuantState(tensors["nested_scale"], code=codes, blocksize=NESTED_BLOCK, dtype=torch.float32)
    unpacked: Tensor = bnb.dequantize_blockwise(scales, nested) + tensors["offset"]
    return unpacked


@lru_cache(maxsize=8)
def code_tables(name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the values of the 16 codes of a 4-bit scheme, and of the 256 codes of quantised scales."""
    bnb = bitsandbytes().functional
    return bnb.get_4bit_type(name, device=device), bnb.create_dynamic_map().to(device)


@dataclass(frozen=True)
class QuantizationInfo:
    """Scheme, shape and dtype of a layer's quantised weight; its tensors are parameters of the layer."""

    scheme: QuantScheme
    shape: tuple[int, int]
    """(out, in)"""
    dtype: torch.dtype
    """dtype that the layer computes in"""


class _Product(torch.autograd.Function):
    """x W^T + b with W dequantised in forward and again in backward, so that W is not in memory between the two.

    Saves the layer, not its tensors, because sharding engines replace those between forward and backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module, bias: Tensor | None) -> Tensor:
        ctx.layer = layer
        return F.linear(x, dequantized_weight(layer).to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        dY = gradients[0]
        dx = dY @ dequantized_weight(ctx.layer).to(dY.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, dY.reshape(-1, dY.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None


def dequantized_weight(layer: nn.Module) -> Tensor:
    """Return the weight (out, in) of a quantised layer, in the dtype that the layer computes in."""
    weight: QuantizationInfo = layer.quantization  # type: ignore[assignment]
    return dequantize(layer._parameters, weight.scheme, weight.shape, weight.dtype)


def _run(layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = _Product.apply(x, layer, bias)  # type: ignore[no-untyped-call]
    return product


def _sizes(layer: nn.Module) -> tuple[int, int]:
    weight: QuantizationInfo = layer.quantization  # type: ignore[assignment]
    return weight.shape


QUANTIZED: Final = LayerKind(
    "Linear", _sizes, F.linear, False, LINEAR.shrink, _run, dequantized_weight, ("quantization",)
)


@final
class QuantLinear(QuantizedLinear):
    """A linear layer with a quantised weight.

    Its tensors are its direct parameters, because sharding engines shard and gather nothing else of a module.
    """

    kind = QUANTIZED

    def __init__(self, weight: QuantizationInfo, tensors: Mapping[str, Tensor], bias: nn.Parameter | None) -> None:
        super().__init__()
        self.quantization, self.dtype, self.name = weight, weight.dtype, weight.scheme.name
        self.out_features, self.in_features = weight.shape
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return _run(self, x, self._parameters["bias"])

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, {self.quantization.scheme.name}"


def bnb_optimizer(name: str, groups: Iterable[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
    """Return an optimizer of bitsandbytes over groups of float32 tensors.

    Raises:
        RunError: as ``check_optimizer``.
    """
    groups = list(groups)
    check_optimizer(name, on_gpu=all(tensor.device.type == "cuda" for group in groups for tensor in group["params"]))
    optimizer: torch.optim.Optimizer = getattr(bitsandbytes().optim, OPTIMIZERS[name])(groups, **settings)
    return optimizer


def check_optimizer(name: str, *, on_gpu: bool) -> None:
    """Raise an error if this machine cannot run an optimizer.

    Raises:
        RunError: bitsandbytes is not installed, or the optimizer needs a GPU.
    """
    if name not in OPTIMIZERS:
        return
    bitsandbytes()
    if name.startswith("paged") and not on_gpu:
        raise RunError(
            f"train.optimizer: {name} pages its state out of a GPU's memory, and there is none; use adamw8bit"
        )


@lru_cache(maxsize=1)
def bitsandbytes() -> Any:
    """Import and return bitsandbytes, with its log messages off during the import.

    Raises:
        RunError: bitsandbytes cannot be imported.
    """
    level = logging.root.manager.disable
    logging.disable(
        logging.CRITICAL
    )  # errors too, because bitsandbytes logs one if its native library cannot be loaded
    try:
        import bitsandbytes
    except ImportError as problem:
        raise RunError(f"bitsandbytes cannot be imported ({problem}); {INSTALL}") from None
    finally:
        logging.disable(level)
    return bitsandbytes
