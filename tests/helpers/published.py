"""Bases quantised as other programs publish them, with the weights that their own code gives back."""

import json
import shutil
from pathlib import Path
from typing import Any, Final

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP: Final = 32
FORMS: Final = (
    "fp8", "fp8-tensor", "float8-channel", "float8-tensor", "int8-channel", "int4", "int4-asymmetric", "int4-channel",
    "gptq", "gptq-ordered", "gptq-v2", "awq", "nvfp4", "mxfp4", "modelopt", "modelopt-float8", "hqq",
)  # fmt: skip
SHIFTS: Final = {"gptq": range(8), "awq": (0, 4, 1, 5, 2, 6, 3, 7)}
"""method -> which four bits of an int32 each of eight neighbours has; AutoAWQ's `order_map`, inverted"""


def publish(base: Path, folder: Path, form: str) -> dict[str, Tensor]:
    """Write a base with its layers quantised in this form; return name -> weight (out, in) in float32 as it is read."""
    shutil.copytree(base, folder)
    stored = load_file(folder / "model.safetensors")
    weights = {}
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        weight = stored.pop(name)
        tensors, weights[name] = _quantized(weight, form)
        module = name.removesuffix("weight")
        stored |= {f"{module}{key}": tensor.contiguous() for key, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": _config(form)}))
    return weights


def _config(form: str) -> dict[str, Any]:
    method = form.split("-")[0]
    if method == "fp8":
        block = None if form == "fp8-tensor" else [GROUP, GROUP]
        return {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic"}
    if method == "gptq":
        own = {"desc_act": form == "gptq-ordered", "checkpoint_format": "gptq_v2" if form == "gptq-v2" else "gptq"}
        return {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, **own}
    if method == "modelopt":  # as NVIDIA's Model Optimizer writes it
        group = {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}
        own = {"config_groups": {"group_0": group}, "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
        return {"quant_method": "modelopt", "quant_algo": "NVFP4" if form == "modelopt" else "FP8", **own}
    if method == "hqq":
        own = {
            "nbits": 4,
            "channel_wise": True,
            "group_size": GROUP,
            "optimize": True,
            "axis": 1,
            "view_as_float": False,
        }
        return {"quant_method": "hqq", "quant_config": {"weight_quant_params": own}, "skip_modules": ["lm_head"]}
    if method == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    packed = {"int4": "pack-quantized", "float8": "float-quantized", "int8": "int-quantized"}.get(
        method, f"{method}-pack-quantized"
    )
    weights = scheme_of(form).weights.model_dump(mode="json")
    return {
        "quant_method": "compressed-tensors", "format": packed, "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip


def scheme_of(form: str) -> QuantizationScheme:
    """The scheme of compressed-tensors."""
    kind, _, how = form.partition("-")
    if kind in ("nvfp4", "mxfp4"):
        own = (
            {"strategy": "tensor_group", "group_size": 16}
            if kind == "nvfp4"
            else {"strategy": "group", "group_size": 32}
        )
        return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=4, type="float", **own))
    grouped = kind == "int4" and how != "channel"
    arguments = QuantizationArgs(
        num_bits=4 if kind == "int4" else 8, type="float" if kind == "float8" else "int",
        strategy="group" if grouped else how, group_size=GROUP if grouped else None, symmetric=how != "asymmetric",
    )  # fmt: skip
    return QuantizationScheme(targets=["Linear"], weights=arguments)


def _quantized(weight: Tensor, form: str) -> tuple[dict[str, Tensor], Tensor]:
    method = form.split("-")[0]
    if method == "fp8":
        size = max(weight.shape) if form == "fp8-tensor" else GROUP
        blocks = weight.unflatten(1, (-1, min(size, weight.shape[1]))).unflatten(0, (-1, min(size, weight.shape[0])))
        scale = blocks.abs().amax((1, 3), keepdim=True) / 448
        codes = (blocks / scale).to(torch.float8_e4m3fn)
        read = (codes.float() * scale).flatten(2, 3).flatten(0, 1)
        grid = scale.reshape(()) if form == "fp8-tensor" else scale[:, 0, :, 0]
        return {"weight": codes.flatten(2, 3).flatten(0, 1), "weight_scale_inv": grid}, read
    if method in SHIFTS:
        return _int4(weight, form)
    if method == "hqq":
        return _hqq(weight)
    if method in ("nvfp4", "mxfp4", "modelopt"):
        return _float4(weight, form)
    scheme = scheme_of(form)
    args = scheme.weights
    span = weight.amax() if args.strategy == "tensor" else weight.unflatten(1, (-1, args.group_size or weight.shape[1]))
    most = span.abs().amax(-1) if span.dim() else span.abs()
    scale = (most / (448 if args.type == "float" else 2 ** (args.num_bits - 1) - 1)).reshape(
        -1 if not most.dim() else most.shape
    )
    zero = None if args.symmetric else torch.randint(-8, 8, scale.shape, dtype=torch.int8)
    given = {"weight": weight, "weight_scale": scale} | ({} if zero is None else {"weight_zero_point": zero})
    form_name = _config(form)["format"]
    compressor = BaseCompressor.get_value_from_registry(form_name)
    tensors = compressor.compress(given, scheme)
    read = compressor.decompress(dict(tensors), scheme)["weight"].float()
    return tensors, read


def _float4(weight: Tensor, form: str) -> tuple[dict[str, Tensor], Tensor]:
    """NVFP4 and MXFP4 by compressed-tensors; Model Optimizer's names and scales from those."""
    if form == "modelopt-float8":
        scale = weight.abs().max() / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(())}, codes.float() * scale
    kind = "mxfp4" if form == "mxfp4" else "nvfp4"
    scheme = scheme_of(kind)
    spans = weight.unflatten(1, (-1, scheme.weights.group_size)).abs().amax(-1)
    total = (448 * 6 / weight.abs().max()).reshape(1)
    scale = spans / 6 * total if kind == "nvfp4" else 2.0 ** (spans / 6).log2().ceil()
    if kind == "nvfp4":
        scale = scale.to(torch.float8_e4m3fn).float()
    given = {"weight": weight, "weight_scale": scale} | ({"weight_global_scale": total} if kind == "nvfp4" else {})
    compressor = BaseCompressor.get_value_from_registry(f"{kind}-pack-quantized")
    tensors = compressor.compress(given, scheme)
    # in float32, because compressed-tensors decompresses to bfloat16
    codes = compressor.decompress({**tensors, "weight_scale": tensors["weight_scale"]}, scheme)["weight"]
    exact = _values(tensors["weight_packed"]) * scale.repeat_interleave(scheme.weights.group_size, 1)
    exact = exact / total if kind == "nvfp4" else exact
    torch.testing.assert_close(codes.float(), exact, rtol=2e-2, atol=1e-4)
    if form == "modelopt":
        tensors["weight"] = tensors.pop("weight_packed")
        tensors["weight_scale_2"] = 1 / tensors.pop("weight_global_scale").reshape(())
    return tensors, exact


def _hqq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """hqq 0.2.8's `Quantizer.quantize`, without its search, and `pack_4bit_u8`."""
    groups = weight.reshape(-1, GROUP)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    scale = (15 / (high - low)).clamp(max=2e4)
    zero = -low * scale
    codes = (groups * scale + zero).round().clamp(0, 15).to(torch.uint8)
    half = len(codes) // 2
    stored = {"W_q": codes[:half] << 4 | codes[half:], "scale": (1 / scale).half(), "zero": zero.half()}
    read = (codes.float() - stored["zero"].float()) * stored["scale"].float()
    flags = {"nbits": torch.tensor(4, dtype=torch.int32), "axis": torch.tensor(1, dtype=torch.int32)}
    return stored | flags | {"shape": torch.tensor(weight.shape)}, read.reshape(weight.shape)


def _values(packed: Tensor) -> Tensor:
    return unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1], dtype=torch.float32)


def _int4(weight: Tensor, form: str) -> tuple[dict[str, Tensor], Tensor]:
    """GPTQ's and AWQ's packing, one code at a time."""
    method = form.split("-")[0]
    out_features, in_features = weight.shape
    groups = in_features // GROUP
    generator = torch.Generator().manual_seed(out_features)
    codes = torch.randint(0, 16, (out_features, in_features), generator=generator)
    zero = torch.randint(1, 16, (out_features, groups), generator=generator)
    scale = (torch.rand((out_features, groups), generator=generator) * 0.02 + 0.01).half()
    block_of = torch.arange(in_features) // GROUP
    if form == "gptq-ordered":
        block_of = block_of[torch.randperm(in_features, generator=generator)]
    read = (codes - zero[:, block_of]) * scale.float()[:, block_of]

    def packed(values: Tensor, dim: int) -> Tensor:
        words = torch.zeros(
            [size // 8 if index == dim else size for index, size in enumerate(values.shape)], dtype=torch.int64
        )
        for index, shift in enumerate(SHIFTS[method]):
            words |= values.index_select(dim, torch.arange(index, values.shape[dim], 8)) << 4 * shift
        return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)

    stored_zero = zero - 1 if form in ("gptq", "gptq-ordered") else zero
    tensors = {
        "qweight": packed(codes.T, 0 if method == "gptq" else 1),
        "qzeros": packed(stored_zero.T, 1),
        "scales": scale.T,
    }
    return tensors | ({"g_idx": block_of.to(torch.int32)} if method == "gptq" else {}), read
