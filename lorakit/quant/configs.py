"""Choose the scheme that a published base's ``quantization_config`` names."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from lorakit.quant.published import Awq, ByteCodes, CompressedInt4, Fp4Blocks, Gptq, Hqq, Mxfp4
from lorakit.quant.schemes import QuantScheme


def _fp8(config: Mapping[str, Any]) -> QuantScheme:
    rows, columns = config.get("weight_block_size") or (None, None)
    name = "fp8-blocks" if rows else "fp8-tensor"
    return ByteCodes(name, mark="weight_scale_inv", codes="float8", rows=rows, columns=columns)


def _modelopt(config: Mapping[str, Any]) -> QuantScheme | str:
    algorithm = config.get("quant_algo")
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
    is_first_form = config.get("checkpoint_format", "gptq") == "gptq"
    is_ordered = bool(config.get("desc_act"))
    columns = _four_bit_group(config)
    if isinstance(columns, str):
        return columns
    return Gptq("gptq", rows=1, columns=columns, has_zeros=True, is_ordered=is_ordered, is_first_form=is_first_form)


def _awq(config: Mapping[str, Any]) -> QuantScheme | str:
    if str(config.get("version", "gemm")).lower() != "gemm":
        return f"version {config.get('version')}; gemm is read"
    columns = _four_bit_group(config)
    return columns if isinstance(columns, str) else Awq("awq", rows=1, columns=columns, has_zeros=True)


def _four_bit_group(config: Mapping[str, Any]) -> int | str | None:
    bits, group = config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size"))
    if bits != 4:
        return f"{bits} bits; 4 are read"
    return None if group == -1 else int(group)


def _compressed(config: Mapping[str, Any]) -> QuantScheme | str:
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1 or groups[0].get("targets") != ["Linear"]:
        return "several groups of layers; one of all linear layers is read"
    weights = groups[0]["weights"]
    kind, bits, strategy = weights["type"], weights["num_bits"], weights["strategy"].removeprefix("tensor_")
    is_symmetric = weights.get("symmetric", True)
    rows, columns = {
        "tensor": (None, None), "channel": (1, None), "group": (1, weights.get("group_size")),
        "block": tuple(weights.get("block_structure") or (None, None)),
    }.get(strategy, (0, 0))  # fmt: skip
    form = groups[0].get("format") or config.get("format")
    if rows == 0 or weights.get("actorder") not in (None, "static", "weight"):
        return f"strategy {strategy} with actorder {weights.get('actorder')}"
    if form == "pack-quantized" and bits == 4 and strategy in ("group", "channel"):
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
