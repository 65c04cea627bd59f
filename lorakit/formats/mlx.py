"""mlx-lm's adapter folder: ``adapters.safetensors`` with A and B transposed, and one scale and rank in its config.

``<module>.lora_a`` (in, r), ``<module>.lora_b`` (r, out); y = x W^T + scale (x lora_a) lora_b. mlx-lm finds a layer by
its name below ``layers.N.``, in the last ``num_layers`` of them.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from lorakit.errors import PatchError, did_you_mean
from lorakit.files.atomic import atomic_folder, write_json
from lorakit.files.safetensors import SafetensorsFile
from lorakit.formats.adapter import ForeignAdapter
from lorakit.formats.factors import Suffixes, group_keys, read_pairs
from lorakit.formats.metadata import ConversionSource, metadata_of
from lorakit.formats.options import Options
from lorakit.formats.places import refuse_embeddings, refuse_full_tensors, write_single
from lorakit.formats.scales import exact_alpha
from lorakit.patch import Caps, Patch

SUFFIXES: Final[Suffixes] = {".lora_a": "lora_A", ".lora_b": "lora_B"}
TENSOR_FILE: Final = "adapters.safetensors"
CONFIG_FILE: Final = "adapter_config.json"
LAYER: Final = re.compile(r"((?:.*?\.)?layers)\.(\d+)\.(.+)")
ALL_LAYERS: Final = -1  # mlx-lm's own sign


def read_mlx(file: SafetensorsFile, options: Options) -> ForeignAdapter:
    """The layers of an mlx-lm folder; ``file`` is its tensor file.

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
    found = exact_alpha(scale, rank)
    if found is None:
        raise PatchError(
            f"{path}: scale {scale!r}: no alpha gives it at rank {rank}, bit for bit; the nearest that has one is"
            f" {scale * rank / rank!r}"
        )
    method, alpha = found
    return ForeignAdapter(file, pairs, dict.fromkeys(pairs, alpha), method=method, dropout=dropout)


def write_mlx(out: Path, patch: Patch, options: Options, origin: ConversionSource) -> str:
    """A folder that mlx-lm loads with ``--adapter-path``.

    Raises:
        PatchError: layers of different scales or ranks, a layer outside ``layers.N.``, or anything but linear layers.
    """
    refuse_full_tensors(patch, "mlx")
    refuse_embeddings(patch, "mlx")
    first, model = next(iter(patch.layers.items()))
    places = _places(patch.folder, patch.layers)
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
            "keys": sorted({key for _, key in places.values()}),
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
    """Rank, scale, dropout and the names of adapted layers."""
    found = config.get("lora_parameters")
    if not isinstance(found, dict):
        raise PatchError(f"{path}: lora_parameters is not there, which holds rank and scale")
    rank, scale, keys, dropout = found.get("rank"), found.get("scale"), found.get("keys"), found.get("dropout", 0.0)
    if type(rank) is not int or rank < 1:
        raise PatchError(f"{path}: lora_parameters.rank must be a positive whole number, got {rank!r}")
    if type(dropout) not in (int, float):
        raise PatchError(f"{path}: lora_parameters.dropout must be a number, got {dropout!r}")
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not 0 < scale < 1e9:
        raise PatchError(f"{path}: lora_parameters.scale must be a positive number, got {scale!r}")
    if keys is not None and not (isinstance(keys, list) and all(isinstance(key, str) for key in keys)):
        raise PatchError(f"{path}: lora_parameters.keys must be a list of names, got {keys!r}")
    return rank, float(scale), float(dropout), keys


def _places(path: Path, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """name -> (N, what is below ``layers.N.``), where mlx-lm looks for layers to adapt: in one stack of them.

    Raises:
        PatchError: a name that is somewhere else.
    """
    found = {}
    stack = None
    for name in names:
        place = LAYER.fullmatch(name)
        if place is None or place.group(1) != (stack or place.group(1)):
            where = f"{stack}.N." if stack else "layers.N."
            raise PatchError(f"{path}: {name} is not below {where}, and mlx-lm adapts nothing else; leave it out")
        stack, found[name] = place.group(1), (int(place.group(2)), place.group(3))
    return found


def _check_applied(
    file: SafetensorsFile, path: Path, num_layers: int, keys: list[str] | None, names: Iterable[str], options: Options
) -> None:
    """Every tensor of the file is one that mlx-lm would apply: it drops the others without a word."""
    places = _places(file.path, names)
    in_base = [LAYER.fullmatch(name) for name in options.base.modules] if options.base else []
    indices = [*(index for index, _ in places.values()), *(int(place.group(2)) for place in in_base if place)]
    total = 1 + max(indices)
    for name, (index, key) in places.items():
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
