"""Read and write mlx-lm's adapter folders: A and B transposed, and one scale and rank in the config.

``<module>.lora_a`` (in, r), ``<module>.lora_b`` (r, out); y = x W^T + scale (x lora_a) lora_b. mlx-lm adapts layers by
their names below ``layers.N.``, in the last ``num_layers`` blocks.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from lorakit.errors import PatchError, did_you_mean
from lorakit.files.atomic import atomic_folder, write_json
from lorakit.files.safetensors import SafetensorsFile
from lorakit.formats.adapter import ForeignAdapter, Options, refuse_embeddings, refuse_full_tensors, write_single
from lorakit.formats.factors import Suffixes, exact_alpha, group_keys, read_pairs
from lorakit.formats.metadata import ConversionSource, metadata_of
from lorakit.patch import Caps, Patch

SUFFIXES: Final[Suffixes] = {".lora_a": "lora_A", ".lora_b": "lora_B"}
TENSOR_FILE: Final = "adapters.safetensors"
CONFIG_FILE: Final = "adapter_config.json"
LAYER: Final = re.compile(r"((?:.*?\.)?layers)\.(\d+)\.(.+)")
ALL_LAYERS: Final = -1  # mlx-lm's value of num_layers for all


def read_mlx(file: SafetensorsFile, options: Options) -> ForeignAdapter:
    """Read the layers of an mlx-lm folder; ``file`` is its tensor file.

    Raises:
        PatchError: not a plain LoRA, a tensor that mlx-lm would not apply, or a scale that no alpha gives.
    """
    path = file.path.parent / CONFIG_FILE
    config = _read_config(path)
    rank, scale, dropout, keys = _parameters(path, config)
    pairs = read_pairs(file, group_keys(file, SUFFIXES), transposed=True)
    for name, pair in pairs.items():
        if pair.rank != rank:
            raise PatchError(f"{file.path}: {name}: rank {pair.rank}, and {path} says {rank} for all layers")
    _check_applied(file, path, config["num_layers"], keys, pairs, options)
    method_and_alpha = exact_alpha(scale, rank)
    if method_and_alpha is None:
        raise PatchError(
            f"{path}: scale {scale!r}: no alpha gives it at rank {rank}, bit for bit; the nearest that has one is"
            f" {scale * rank / rank!r}"
        )
    method, alpha = method_and_alpha
    return ForeignAdapter(file, pairs, dict.fromkeys(pairs, alpha), method=method, dropout=dropout)


def write_mlx(out: Path, patch: Patch, options: Options, origin: ConversionSource) -> str:
    """Write a folder that mlx-lm loads with ``--adapter-path``.

    Raises:
        PatchError: layers have different scales or ranks, one is outside ``layers.N.``, or one is not linear.
    """
    refuse_full_tensors(patch, "mlx")
    refuse_embeddings(patch, "mlx")
    first, model = next(iter(patch.layers.items()))
    positions = _layer_positions(patch.folder, patch.layers)
    for name, layer in patch.layers.items():
        if (layer.scale, layer.rank) != (model.scale, model.rank):
            raise PatchError(
                f"{patch.folder}: {first} has scale {model.scale!r} and rank {model.rank}, {name} has {layer.scale!r}"
                f" and {layer.rank}; mlx-lm has one of both for all layers. kohya and diffusers have one for each"
            )
    config = {
        "fine_tune_type": "lora", "num_layers": ALL_LAYERS,
        "lora_parameters": {
            "rank": model.rank, "scale": model.scale, "dropout": patch.config.dropout,
            "keys": sorted({key for _, key in positions.values()}),
        },
    }  # fmt: skip
    parts = {"lora_A": "lora_a", "lora_B": "lora_b"}
    tensors = {
        f"{name}.{parts[part]}": tensor.T.contiguous()
        for name, layer in patch.layers.items()
        for part, tensor in layer.tensors.items()
    }
    with atomic_folder(out) as staging:
        write_single(staging / TENSOR_FILE, tensors, metadata_of(patch, origin))
        write_json(staging / CONFIG_FILE, config)
    return "names are the base's own; mlx-lm uses the same for models like Llama, Qwen, Mistral and Gemma"


def _read_config(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            config = json.loads(file.read(Caps().header_bytes))
    except FileNotFoundError:
        raise PatchError(
            f"{path}: no such file; mlx-lm writes it beside {TENSOR_FILE}, and it holds the scale"
        ) from None
    except (ValueError, RecursionError, OSError) as problem:
        raise PatchError(f"{path}: cannot be read: {problem}") from None
    if not isinstance(config, dict):
        raise PatchError(f"{path}: not a mapping")
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        raise PatchError(
            f"{path}: fine_tune_type: {kind!r}; only 'lora' has a place in a patch. mlx_lm.fuse merges the others"
        )
    if type(config.get("num_layers")) is not int:
        old = " (lora_layers is of a time when the scale was counted otherwise)" if "lora_layers" in config else ""
        raise PatchError(f"{path}: num_layers is not there{old}; save the adapter with a current mlx-lm")
    return config


def _parameters(path: Path, config: Mapping[str, Any]) -> tuple[int, float, float, list[str] | None]:
    """Return (rank, scale, dropout, names of adapted layers below ``layers.N.`` or None for all)."""
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise PatchError(f"{path}: lora_parameters is not there, which holds rank and scale")
    rank, scale, keys = (parameters.get(key) for key in ("rank", "scale", "keys"))
    dropout = parameters.get("dropout", 0.0)
    if type(rank) is not int or rank < 1:
        raise PatchError(f"{path}: lora_parameters.rank must be a positive whole number, got {rank!r}")
    if type(dropout) not in (int, float):
        raise PatchError(f"{path}: lora_parameters.dropout must be a number, got {dropout!r}")
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not 0 < scale < 1e9:
        raise PatchError(f"{path}: lora_parameters.scale must be a positive number, got {scale!r}")
    if keys is not None and not (isinstance(keys, list) and all(isinstance(key, str) for key in keys)):
        raise PatchError(f"{path}: lora_parameters.keys must be a list of names, got {keys!r}")
    return rank, float(scale), float(dropout), keys


def _layer_positions(path: Path, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Return name -> (N, the name below ``layers.N.``); mlx-lm adapts layers of one such stack only.

    Raises:
        PatchError: a name is not in the stack.
    """
    positions = {}
    stack = None
    for name in names:
        match = LAYER.fullmatch(name)
        if match is None or match.group(1) != (stack or match.group(1)):
            where = f"{stack}.N." if stack else "layers.N."
            raise PatchError(f"{path}: {name} is not below {where}, and mlx-lm adapts nothing else; leave it out")
        stack, positions[name] = match.group(1), (int(match.group(2)), match.group(3))
    return positions


def _check_applied(
    file: SafetensorsFile, path: Path, num_layers: int, keys: list[str] | None, names: Iterable[str], options: Options
) -> None:
    """Check that mlx-lm would apply every tensor of the file; it drops others without a message.

    Raises:
        PatchError: names the first tensor that it would drop.
    """
    positions = _layer_positions(file.path, names)
    in_base = [LAYER.fullmatch(name) for name in options.base.modules] if options.base else []
    indices = [*(index for index, _ in positions.values()), *(int(match.group(2)) for match in in_base if match)]
    total = 1 + max(indices)
    for name, (index, key) in positions.items():
        if keys is not None and key not in keys:
            raise PatchError(
                f"{file.path}: {name}: {path} does not name {key} in lora_parameters.keys, so mlx-lm would not apply"
                f" it.{did_you_mean(key, keys)}"
            )
        if 0 < num_layers < total - index:
            raise PatchError(
                f"{file.path}: {name}: {path} says the last {num_layers} of at least {total} layers, so mlx-lm would"
                " not apply it"
            )
