"""Weights in 4 and 8 bits, and optimizers that keep their state so; the only importer of bitsandbytes.

A packed layer computes y = x W^T with W unpacked to floats for the moment of the product, forward and backward alike,
so that training is exactly training on the unpacked weights. Sources: Dettmers et al. 2023 (arXiv 2305.14314) for nf4
and double quantisation, Dettmers et al. 2022 (arXiv 2208.07339) for rows of int8.
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
PIECE_ELEMENTS: Final = 1 << 18  # on a CPU packing takes 64 bytes for every value that it packs at a time
INSTALL: Final = "install it with `pip install 'lorakit[quant]'`"
OPTIMIZERS: Final = {"adamw8bit": "AdamW8bit", "paged_adamw8bit": "PagedAdamW8bit", "paged_adamw": "PagedAdamW"}


@dataclass(frozen=True)
class QuantScheme:
    """How weights are packed: ``nf4`` or ``fp4`` in blocks of 64 values, ``int8`` by rows."""

    name: str
    double_quant: bool = False
    """whether the scales of the blocks are packed too, in 8 bits"""

    def shapes(self, out_features: int, in_features: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """name -> (shape, dtype) of the tensors of a packed weight."""
        if self.name == "int8":
            return {"weight": ((out_features, in_features), torch.int8), "row_scale": ((out_features,), torch.float32)}
        size = out_features * in_features
        blocks = math.ceil(size / BLOCK)
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"weight": ((math.ceil(size / 2),), torch.uint8)}
        if not self.double_quant:
            return found | {"block_scale": ((blocks,), torch.float32)}
        nested = ((math.ceil(blocks / NESTED_BLOCK),), torch.float32)
        return found | {
            "block_scale": ((blocks,), torch.uint8),
            "nested_scale": nested,
            "offset": ((1,), torch.float32),
        }

    def num_bytes(self, out_features: int, in_features: int) -> int:
        """Bytes of a packed weight."""
        return sum(
            math.prod(shape) * dtype.itemsize for shape, dtype in self.shapes(out_features, in_features).values()
        )


def quantize(W: Tensor, packing: QuantScheme) -> dict[str, Tensor]:
    """The tensors of a packed weight (out, in), as bitsandbytes packs it."""
    bnb = bitsandbytes().functional
    W = W.detach().contiguous()
    if packing.name == "int8":
        weight, scale, _ = bnb.int8_vectorwise_quant(W.to(torch.float16))
        return {"weight": weight, "row_scale": scale}
    flat = W.view(-1)
    parts = [bnb.quantize_4bit(part, blocksize=BLOCK, quant_type=packing.name) for part in flat.split(PIECE_ELEMENTS)]
    weight, scale = torch.cat([part.view(-1) for part, _ in parts]), torch.cat([state.absmax for _, state in parts])
    if not packing.double_quant:
        return {"weight": weight, "block_scale": scale}
    offset = scale.mean()
    packed, state = bnb.quantize_blockwise(scale - offset, blocksize=NESTED_BLOCK)
    return {
        "weight": weight, "block_scale": packed, "nested_scale": state.absmax, "offset": offset.view(1),
    }  # fmt: skip


def dequantize(
    tensors: Mapping[str, Tensor | None], packing: QuantScheme, shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """The weight (out, in) that packed tensors stand for."""
    weight, bnb = tensors["weight"], bitsandbytes().functional
    assert weight is not None
    if packing.name == "int8":
        unpacked: Tensor = bnb.int8_vectorwise_dequant(weight, tensors["row_scale"]).to(dtype)
        return unpacked
    codes = code_tables(packing.name, weight.device)
    state2 = None
    if packing.double_quant:
        state2 = bnb.QuantState(
            tensors["nested_scale"], code=codes[1], blocksize=NESTED_BLOCK, dtype=torch.float32
        )  # fmt: skip
    offset = tensors["offset"] if packing.double_quant else None
    state = bnb.QuantState(
        tensors["block_scale"], shape=torch.Size(shape), code=codes[0], blocksize=BLOCK, quant_type=packing.name,
        dtype=dtype, offset=None if offset is None else offset.view(()), state2=state2,
    )  # fmt: skip
    restored: Tensor = bnb.dequantize_4bit(weight.view(-1, 1), state)
    return restored


@lru_cache(maxsize=8)
def code_tables(name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """The values of the 16 codes, and of the 256 codes of packed scales."""
    bnb = bitsandbytes().functional
    return bnb.get_4bit_type(name, device=device), bnb.create_dynamic_map().to(device)


@dataclass(frozen=True)
class QuantizedWeight:
    """What the tensors of a packed layer stand for."""

    scheme: QuantScheme
    shape: tuple[int, int]
    """(out, in)"""
    dtype: torch.dtype
    """in which it computes"""


class _Product(torch.autograd.Function):
    """x W^T + b with W unpacked twice rather than kept. The layer is kept, not its tensors: engines replace those."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module, bias: Tensor | None) -> Tensor:
        ctx.layer = layer
        return F.linear(x, floats(layer).to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        dY = gradients[0]
        dx = dY @ floats(ctx.layer).to(dY.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, dY.reshape(-1, dY.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None


def floats(layer: nn.Module) -> Tensor:
    """The weight (out, in) of a packed layer, in the dtype it computes in."""
    facts: QuantizedWeight = layer.packed  # type: ignore[assignment]
    return dequantize(layer._parameters, facts.scheme, facts.shape, facts.dtype)


def _run(layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = _Product.apply(x, layer, bias)  # type: ignore[no-untyped-call]
    return product


def _sizes(layer: nn.Module) -> tuple[int, int]:
    facts: QuantizedWeight = layer.packed  # type: ignore[assignment]
    return facts.shape


PACKED: Final = LayerKind("Linear", _sizes, F.linear, False, LINEAR.shrink, _run, floats, ("packed",))


@final
class QuantLinear(QuantizedLinear):
    """A linear layer with a packed weight; its tensors are all its own parameters, so that engines can cut them."""

    kind = PACKED

    def __init__(self, facts: QuantizedWeight, tensors: Mapping[str, Tensor], bias: nn.Parameter | None) -> None:
        super().__init__()
        self.packed, self.dtype, self.name = facts, facts.dtype, facts.scheme.name
        self.out_features, self.in_features = facts.shape
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return _run(self, x, self._parameters["bias"])

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, {self.packed.scheme.name}"


def bnb_optimizer(name: str, groups: Iterable[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
    """An optimizer of bitsandbytes over groups of float32 tensors.

    Raises:
        RunError: it keeps its state in memory that only GPUs have.
    """
    groups = list(groups)
    check_optimizer(name, on_gpu=all(tensor.device.type == "cuda" for group in groups for tensor in group["params"]))
    optimizer: torch.optim.Optimizer = getattr(bitsandbytes().optim, OPTIMIZERS[name])(groups, **settings)
    return optimizer


def check_optimizer(name: str, *, on_gpu: bool) -> None:
    """Passes when an optimizer can be had here.

    Raises:
        RunError: bitsandbytes is not installed, or it needs a GPU.
    """
    if name == "adamw":
        return
    bitsandbytes()
    if name.startswith("paged") and not on_gpu:
        raise RunError(
            f"train.optimizer: {name} pages its state out of a GPU's memory, and there is none; use adamw8bit"
        )


@lru_cache(maxsize=1)
def bitsandbytes() -> Any:
    """bitsandbytes, imported without its notes.

    Raises:
        RunError: it is not installed.
    """
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        import bitsandbytes
    except ImportError as problem:
        raise RunError(f"bitsandbytes cannot be imported ({problem}); {INSTALL}") from None
    finally:
        logging.disable(level)
    return bitsandbytes
