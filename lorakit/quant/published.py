"""Formats in which other programs publish quantised bases: read, and one of them made (`fp8`).

Each format is a class, chosen by a base's ``quantization_config``. It turns the tensors of a file into codes of 8 or 4
bits with a scale, and perhaps a zero, for each block of values:

    W[i, j] = (code[i, j] - zero[b]) x scale[b], in float32, rounded once; b: the block of row i and column j

Sources: the packing code of compressed-tensors 0.20, GPTQModel 7.7, AutoAWQ 0.2 and hqq 0.2.8, transformers' FP8
blocks, and NVIDIA's description of Model Optimizer's unified checkpoints.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, final

import torch
from torch import Tensor

from lorakit.errors import BaseModelError
from lorakit.ops.stored_names import MXFP4_CODES
from lorakit.quant.schemes import FourBitBlocks, Int8Rows, QuantScheme, Shapes

E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""the floats of 4 bits, by their codes"""
NIBBLES: Final = 8  # codes of 4 bits in an int32
AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # position in an int32 of each of eight neighbouring columns
TO_FLOAT: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "float8": lambda codes: codes.view(torch.float8_e4m3fn).float(),
    "int8": lambda codes: codes.view(torch.int8).float(),
    "float4": lambda codes: torch.tensor(E2M1, device=codes.device)[nibbles(codes).int()],
    "uint4": lambda codes: nibbles(codes).float(),
}
"""kind of codes -> their values (out, in) in float32, of bytes (out, in) or (out, in / 2)"""
HALF_BYTES: Final = ("float4", "uint4")


@dataclass(frozen=True)
class PublishedScheme(QuantScheme):
    """A published format."""

    mark: str = "qweight"  # ending of the stored name that only quantised weights have
    codes: str = "uint4"  # a key of TO_FLOAT
    rows: int | None = None  # of a block; None: all
    columns: int | None = None
    has_zeros: bool = False
    zero_dtype: ClassVar[torch.dtype] = torch.uint8
    is_ordered: bool = False  # columns belong to blocks in any order, as GPTQ's `desc_act` has them

    @abstractmethod
    def features(self, mark: tuple[int, ...], weight: tuple[int, ...]) -> tuple[int, int]:
        """Return (out, in), from the stored shapes of `mark` and of `weight`, which is empty without one.

        In place of the latter the values of a tensor `shape`, where there is one.
        """

    def grid(self, out_features: int, in_features: int) -> tuple[int, int]:
        """Return the numbers of blocks in a column and in a row."""
        columns = self.columns or in_features
        return math.ceil(out_features / (self.rows or out_features)), math.ceil(in_features / columns)

    def shapes(self, out_features: int, in_features: int) -> Shapes:
        width = in_features // 2 if self.codes in HALF_BYTES else in_features
        grid = self.grid(out_features, in_features)
        shapes: Shapes = {"weight": ((out_features, width), torch.uint8), "block_scale": (grid, torch.float32)}
        shapes |= {"block_zero": (grid, self.zero_dtype)} if self.has_zeros else {}
        return shapes | ({"block_of": ((in_features,), torch.int32)} if self.is_ordered else {})

    def dequantize(self, tensors: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        values = TO_FLOAT[self.codes](tensors["weight"])
        if (zero := tensors.get("block_zero")) is not None:
            values -= self._spread(zero.float(), shape, tensors)
        elif self.codes == "uint4":
            values -= NIBBLES  # the middle of 0 to 15
        return values.mul_(self._spread(tensors["block_scale"], shape, tensors)).to(dtype)

    def _spread(self, grid: Tensor, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the value of each weight's block, (out or 1, in or 1)."""
        out_features, in_features = shape
        if self.rows not in (None, 1):
            grid = grid.repeat_interleave(self.rows or 1, 0)[:out_features]
        if (block_of := tensors.get("block_of")) is not None:
            return grid[:, block_of.long()]
        return grid if self.columns is None else grid.repeat_interleave(self.columns, 1)[:, :in_features]

    def working_bytes(self, num_values: int) -> int:
        return 9 * num_values if self.codes == "float8" else 0  # of `fp8`, which quantises: two float32 and a code

    def stored_names(self, weight: str) -> dict[str, str]:
        module = weight.removesuffix("weight")
        return {ending: f"{module}{ending}" for ending in self.stored_shapes(8, 8)}


@final
@dataclass(frozen=True)
class ByteCodes(PublishedScheme):
    """A byte for each value: FP8 as DeepSeek and Qwen publish it, and compressed-tensors' FP8 and int8."""

    def stored_shapes(self, out_features: int, in_features: int) -> Shapes:
        dtype = torch.float8_e4m3fn if self.codes == "float8" else torch.int8
        grid = self.grid(out_features, in_features)
        return {"weight": ((out_features, in_features), dtype), self.mark: (grid, torch.float32)}

    def features(self, mark: tuple[int, ...], weight: tuple[int, ...]) -> tuple[int, int]:
        return weight[0], math.prod(weight[1:])

    def quantize(self, W: Tensor) -> dict[str, Tensor]:
        scale = W.detach().abs().amax(1, keepdim=True).float() / torch.finfo(torch.float8_e4m3fn).max
        scale[scale == 0] = 1.0  # of a row of zeros
        codes = (W.detach().float() / scale).to(torch.float8_e4m3fn)
        return {"weight": codes.view(torch.uint8), "block_scale": scale}

    def stored_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        weight = tensors["weight"]
        scale = tensors[self.mark].float().reshape(self.grid(*weight.shape))
        return {"weight": weight.view(torch.uint8), "block_scale": scale}


@final
@dataclass(frozen=True)
class Fp4Blocks(PublishedScheme):
    """Floats of 4 bits: NVFP4 has FP8 scales of 16 columns and one of the layer, MXFP4 powers of two of 32."""

    packed: str = "weight_packed"
    full_scale: str = ""  # ending of the name of the layer's scale; empty without one

    def stored_shapes(self, out_features: int, in_features: int) -> Shapes:
        scale = torch.float8_e4m3fn if self.full_scale else torch.uint8
        shapes: Shapes = {self.packed: ((out_features, in_features // 2), torch.uint8)}
        shapes |= {"weight_scale": (self.grid(out_features, in_features), scale)}
        return shapes | ({self.full_scale: ((1,), torch.float32)} if self.full_scale else {})

    def features(self, mark: tuple[int, ...], weight: tuple[int, ...]) -> tuple[int, int]:
        codes = mark if self.mark == self.packed else weight
        return codes[0], 2 * math.prod(codes[1:])

    def stored_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        scale = tensors["weight_scale"]
        if not self.full_scale:
            scale = torch.ldexp(torch.ones_like(scale, dtype=torch.float32), scale.int() - Mxfp4.BIAS)
        elif self.mark == self.packed:  # compressed-tensors stores the reciprocal
            scale = scale.float() / tensors[self.full_scale].float()
        else:
            scale = scale.float() * tensors[self.full_scale].float()
        return {"weight": tensors[self.packed].view(torch.uint8), "block_scale": scale}


@final
@dataclass(frozen=True)
class CompressedInt4(PublishedScheme):
    """compressed-tensors' packed int4: eight columns in an int32, from 0 to 15 with 8 in the middle."""

    def stored_shapes(self, out_features: int, in_features: int) -> Shapes:
        packed = ((out_features, in_features // NIBBLES), torch.int32)
        grid = self.grid(out_features, in_features)
        shapes: Shapes = {self.mark: packed, "weight_scale": (grid, torch.bfloat16)}
        zeros = ((math.ceil(out_features / NIBBLES), grid[1]), torch.int32)
        return shapes | ({"weight_zero_point": zeros} if self.has_zeros else {})

    def features(self, mark: tuple[int, ...], weight: tuple[int, ...]) -> tuple[int, int]:
        return mark[0], mark[1] * NIBBLES

    def stored_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        packed = tensors[self.mark]
        grid = self.grid(packed.shape[0], packed.shape[1] * NIBBLES)
        # little-endian, so the bytes of an int32 hold its columns in order
        scale = tensors["weight_scale"].float().reshape(grid)
        read = {"weight": packed.contiguous().view(torch.uint8), "block_scale": scale}
        if self.has_zeros:
            read["block_zero"] = unpacked(tensors["weight_zero_point"].T).T[: grid[0]].contiguous()
        return read


@final
@dataclass(frozen=True)
class Gptq(PublishedScheme):
    """GPTQ with 4 bits: eight rows of the transposed weight in an int32. Its first form stores zeros less one."""

    is_first_form: bool = True

    def stored_shapes(self, out_features: int, in_features: int) -> Shapes:
        _, groups = self.grid(out_features, in_features)
        return {
            self.mark: ((in_features // NIBBLES, out_features), torch.int32),
            "qzeros": ((groups, out_features // NIBBLES), torch.int32),
            "scales": ((groups, out_features), torch.float16),
            "g_idx": ((in_features,), torch.int32),
        }

    def features(self, mark: tuple[int, ...], weight: tuple[int, ...]) -> tuple[int, int]:
        return mark[1], mark[0] * NIBBLES

    def stored_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        zero = unpacked(tensors["qzeros"]).T.contiguous()
        block_of = tensors["g_idx"]
        in_order = torch.arange(len(block_of), device=block_of.device) // (self.columns or len(block_of))
        is_known = bool(torch.all((block_of >= 0) & (block_of < zero.shape[1])))
        if not self.is_ordered:
            is_known = torch.equal(block_of.long(), in_order)
        if not is_known:
            raise BaseModelError(f"g_idx: not the columns of {zero.shape[1]} groups with desc_act: {self.is_ordered}")
        read = {
            "weight": tensors[self.mark].T.contiguous().view(torch.uint8),
            "block_scale": tensors["scales"].T.float().contiguous(),
            "block_zero": (zero + 1) & 15 if self.is_first_form else zero,
        }
        return read | ({"block_of": block_of} if self.is_ordered else {})


@final
@dataclass(frozen=True)
class Awq(PublishedScheme):
    """AWQ with 4 bits: eight columns of the transposed weight in an int32, in an order of its own."""

    def stored_shapes(self, out_features: int, in_features: int) -> Shapes:
        _, groups = self.grid(out_features, in_features)
        return {
            self.mark: ((in_features, out_features // NIBBLES), torch.int32),
            "qzeros": ((groups, out_features // NIBBLES), torch.int32),
            "scales": ((groups, out_features), torch.float16),
        }

    def features(self, mark: tuple[int, ...], weight: tuple[int, ...]) -> tuple[int, int]:
        return mark[1] * NIBBLES, mark[0]

    def stored_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        codes, zero = (unpacked(tensors[name], AWQ_ORDER).T.contiguous() for name in (self.mark, "qzeros"))
        return {
            "weight": codes[:, ::2] | codes[:, 1::2] << 4,
            "block_scale": tensors["scales"].T.float().contiguous(),
            "block_zero": zero,
        }


@final
@dataclass(frozen=True)
class Hqq(PublishedScheme):
    """HQQ with 4 bits along the inputs: a byte has a code of a group, and one of a group half of the weight further."""

    zero_dtype: ClassVar[torch.dtype] = torch.float32

    def stored_shapes(self, out_features: int, in_features: int) -> Shapes:
        rows, columns = self.grid(out_features, in_features)
        numbers = ((rows * columns, 1), torch.float16)
        codes = ((rows * columns // 2, in_features // columns), torch.uint8)
        return {self.mark: codes, "scale": numbers, "zero": numbers, "shape": ((2,), torch.int64)}

    def features(self, mark: tuple[int, ...], weight: tuple[int, ...]) -> tuple[int, int]:
        out_features, in_features = weight or (0, 0)
        return out_features, in_features

    def stored_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        out_features, in_features = map(int, tensors["shape"])
        grid = self.grid(out_features, in_features)
        packed = tensors[self.mark]
        codes = torch.cat([packed >> 4, packed & 15]).view(out_features, in_features)
        scale, zero = (tensors[name].float().reshape(grid) for name in ("scale", "zero"))
        return {"weight": codes[:, ::2] | codes[:, 1::2] << 4, "block_scale": scale, "block_zero": zero}


@final
@dataclass(frozen=True)
class Mxfp4(QuantScheme):
    """The experts of gpt-oss: floats of 4 bits, and a power of two for each 32 of an input's weights.

    Files have codes (experts, out, blocks, 16) and exponents (experts, out, blocks); the parameter is (experts, in,
    out). Source: OCP Microscaling formats 1.0, with the low half of a byte first. All values are exact in bfloat16.
    """

    block: ClassVar[int] = 32
    BIAS: ClassVar[int] = 127

    def shapes(self, out_features: int, in_features: int) -> Shapes:
        blocks = (out_features, in_features // self.block)
        return {"weight": ((*blocks, self.block // 2), torch.uint8), "block_scale": (blocks, torch.uint8)}

    def stored_names(self, weight: str) -> dict[str, str]:
        return {"weight": f"{weight}{MXFP4_CODES}", "block_scale": f"{weight}_scales"}

    def dequantize(self, tensors: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return one expert's weight (out, in), or the parameter of all (experts, in, out)."""
        codes, exponents = tensors["weight"], tensors["block_scale"]
        if len(shape) == 3:
            W = torch.empty(shape, dtype=dtype, device=codes.device)
            for own, code, exponent in zip(W, codes, exponents, strict=True):  # each alone, since an index takes memory
                own.copy_(self.dequantize({"weight": code, "block_scale": exponent}, shape[:0:-1], dtype).T)
            return W
        values = torch.tensor(E2M1, dtype=dtype, device=codes.device)[nibbles(codes).int()]
        scale = torch.ldexp(torch.ones_like(exponents, dtype=dtype), exponents.int() - self.BIAS)
        return values.mul_(scale[..., None]).flatten(-2)


def nibbles(codes: Tensor) -> Tensor:
    """Return the two codes of each byte (..., n), low half first, (..., 2 n)."""
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)


def unpacked(packed: Tensor, order: tuple[int, ...] = tuple(range(NIBBLES))) -> Tensor:
    """Return the codes of 4 bits in int32s (rows, columns), as uint8 (rows, 8 x columns)."""
    shifts = 4 * torch.tensor(order, device=packed.device)
    return (packed[..., None] >> shifts & 15).to(torch.uint8).flatten(-2)


SCALES: Final = ("weight_scale_inv", "weight_scale", "scales", "scale", "zero")  # stored in any type of floats
SCHEMES: Final[Mapping[str, Callable[..., QuantScheme]]] = {
    "nf4": FourBitBlocks,
    "fp4": FourBitBlocks,
    "int8": Int8Rows,
    "fp8": partial(ByteCodes, mark="weight_scale", codes="float8", rows=1),
}
"""`base.quantize` of a recipe -> the scheme that is made"""


def quant_scheme(name: str, *, double_quant: bool = True) -> QuantScheme:
    """Return a scheme of the table. double_quant: for schemes with blocks, whose scales can be quantised."""
    scheme = SCHEMES[name](name)
    return SCHEMES[name](name, double_quant and scheme.block is not None)


def _fp8(config: Mapping[str, Any]) -> QuantScheme:
    rows, columns = config.get("weight_block_size") or (None, None)
    name = "fp8-blocks" if rows else "fp8-tensor"
    return ByteCodes(name, mark="weight_scale_inv", codes="float8", rows=rows, columns=columns)


def _modelopt(config: Mapping[str, Any]) -> QuantScheme | str:
    algorithm = config.get("quant_algo")
    if config.get("quantized_layers"):
        return "quantized_layers, settings of each layer"
    if algorithm == "FP8":
        return ByteCodes("float8", mark="weight_scale", codes="float8")
    if algorithm != "NVFP4":
        return f"{algorithm}; FP8 and NVFP4 are read"
    total = "weight_scale_2"
    return Fp4Blocks("nvfp4", mark=total, codes="float4", rows=1, columns=16, packed="weight", full_scale=total)


def _hqq(config: Mapping[str, Any]) -> QuantScheme | str:
    own = config["quant_config"].get("weight_quant_params") or {}
    if (own.get("nbits"), own.get("axis"), bool(own.get("view_as_float"))) != (4, 1, False):
        return f"{own or 'settings for each layer'}; 4 bits along axis 1 are read, not viewed as floats"
    return Hqq("hqq", mark="W_q", rows=1, columns=own.get("group_size"), has_zeros=True)


def _gptq(config: Mapping[str, Any]) -> QuantScheme | str:
    form = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
    if form not in ("gptq", "gptq_v2"):
        return f"checkpoint_format {form}; gptq and gptq_v2 are read"
    if config.get("rotation"):
        return f"rotation {config['rotation']}, which a model repeats on its activations"
    is_ordered = bool(config.get("desc_act"))
    columns = _four_bit_group(config)
    if isinstance(columns, str):
        return columns
    return Gptq("gptq", rows=1, columns=columns, has_zeros=True, is_ordered=is_ordered, is_first_form=form == "gptq")


def _awq(config: Mapping[str, Any]) -> QuantScheme | str:
    version = config.get("version") or config.get("format") or "gemm"
    if str(version).lower() != "gemm":
        return f"version {version}; gemm is read"
    columns = _four_bit_group(config)
    return columns if isinstance(columns, str) else Awq("awq", rows=1, columns=columns, has_zeros=True)


def _four_bit_group(config: Mapping[str, Any]) -> int | str | None:
    bits, group = config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size"))
    if bits != 4:
        return f"{bits!r} bits; 4 are read"
    return None if group == -1 else int(group)


def _compressed(config: Mapping[str, Any]) -> QuantScheme | str:
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1 or groups[0].get("targets") != ["Linear"]:
        return "several groups of layers; one of all linear layers is read"
    weights = groups[0]["weights"]
    kind, bits, strategy = weights["type"], weights["num_bits"], weights["strategy"].removeprefix("tensor_")
    is_symmetric = weights.get("symmetric", True)
    transforms = ((config.get("transform_config") or {}).get("config_groups") or {}).values()
    locations = {apply["location"] for group in transforms for apply in group["apply"]}
    if online := locations - {"weight_input", "weight_output"}:
        return f"transform_config of {', '.join(sorted(online))}, which a model repeats on its activations"
    rows, columns = {
        "tensor": (None, None), "channel": (1, None), "group": (1, weights.get("group_size")),
        "block": tuple(weights.get("block_structure") or (None, None)),
    }.get(strategy, (0, 0))  # fmt: skip
    form = groups[0].get("format") or config.get("format")
    if type(is_symmetric) is not bool:
        return f"symmetric {is_symmetric!r}"
    if rows == 0 or weights.get("actorder") not in (None, "static", "weight"):
        return f"strategy {strategy} with actorder {weights.get('actorder')}"
    if form == "pack-quantized" and kind == "int" and bits == 4 and strategy in ("group", "channel"):
        return CompressedInt4("int4", mark="weight_packed", rows=rows, columns=columns, has_zeros=not is_symmetric)
    if form in ("float-quantized", "int-quantized", "naive-quantized") and bits == 8 and is_symmetric:
        name, codes = ("float8", "float8") if kind == "float" else ("int8-compressed", "int8")
        return ByteCodes(name, mark="weight_scale", codes=codes, rows=rows, columns=columns)
    if form in ("nvfp4-pack-quantized", "mxfp4-pack-quantized") and is_symmetric:
        name, full_scale = form[:5], "weight_global_scale" if form.startswith("nv") else ""
        return Fp4Blocks(name, mark="weight_packed", codes="float4", rows=rows, columns=columns, full_scale=full_scale)
    return f"{bits} bits of {kind} as {form}"


METHODS: Final[Mapping[str, Callable[[Mapping[str, Any]], QuantScheme | str]]] = {
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "hqq": _hqq,
    "mxfp4": lambda config: Mxfp4("mxfp4"),
}
"""`quant_method` of config.json -> its scheme, or what of it is not read"""
