"""Read and write diffusers' files: dotted names, and a LoraConfig in the header or an alpha for every layer.

Four spellings of the factors are read. ``<component>.<module>.lora_A.weight`` with the LoraConfig is written, as
diffusers itself does. In a file with neither config nor alphas, every layer has the same rank r and s = 1.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lorakit.errors import PatchError
from lorakit.files.safetensors import SafetensorsFile
from lorakit.formats.adapter import ForeignAdapter, Options, refuse_embeddings, refuse_full_tensors, write_single
from lorakit.formats.factors import PLAIN, FactorPair, Keys, Suffixes, group_keys, read_pairs, read_scalar
from lorakit.formats.metadata import ConversionSource, metadata_of
from lorakit.patch import Patch
from lorakit.patch.adapter_config import PatchConfig, config_json, parse_config

SUFFIXES: Final[Suffixes] = {
    ".lora_A.weight": "lora_A", ".lora_B.weight": "lora_B",
    ".lora.down.weight": "lora_A", ".lora.up.weight": "lora_B",
    ".lora_linear_layer.down.weight": "lora_A", ".lora_linear_layer.up.weight": "lora_B",
    ".lora_down.weight": "lora_A", ".lora_up.weight": "lora_B",
    ".alpha": "alpha",
}  # fmt: skip
COMPONENTS: Final = (
    "unet", "transformer", "transformer_2", "text_encoder", "text_encoder_2", "text_encoder_3", "diffusion_model",
)  # fmt: skip
"""first parts of names: the models of a pipeline"""
CONFIG: Final = "lora_adapter_metadata"
"""key of the LoraConfig in the header's metadata; each setting is prefixed with its component"""


def read_diffusers(file: SafetensorsFile, options: Options) -> ForeignAdapter:
    """Read the layers of one component of a diffusers file.

    Raises:
        PatchError: several components and no ``prefix``, alphas for some layers only, or a damaged pair.
    """
    header = _header(file)
    prefix = _prefix(file, header, options)
    keys = group_keys(file, SUFFIXES, prefix)
    pairs = read_pairs(file, keys)
    settings = {key.removeprefix(prefix): value for key, value in header.items() if key.startswith(prefix)}
    if header and not settings:
        raise PatchError(
            f"{file.path}: {CONFIG} in the header says nothing of {prefix!r}, so there is no scale to read"
        )
    if settings:
        config = _parse_header_config(file, settings, keys, pairs)
        if config.method not in PLAIN:
            raise PatchError(f"{file.path}: use_dora in the header: magnitudes of DoRA are not converted")
        alphas = {name: config.alpha_of(name) for name in pairs}
        return ForeignAdapter(file, pairs, alphas, method=config.method, dropout=config.dropout)
    return ForeignAdapter(file, pairs, _alphas(file, keys, pairs))


def write_diffusers(out: Path, patch: Patch, options: Options, origin: ConversionSource) -> str:
    """Write one file with the LoraConfig in its header, which stores every scale exactly.

    Raises:
        PatchError: the patch holds more than updates of linear layers.
    """
    refuse_full_tensors(patch, "diffusers")
    refuse_embeddings(patch, "diffusers")
    prefix = _with_dot(options.prefix or "")
    parts = {"lora_A": ".lora_A.weight", "lora_B": ".lora_B.weight"}
    tensors = {
        f"{prefix}{module}{parts[part]}": tensor
        for module, layer in patch.layers.items()
        for part, tensor in layer.tensors.items()
    }
    config = {f"{prefix}{key}": value for key, value in _lora_config(patch).items()}
    write_single(out, tensors, {**metadata_of(patch, origin), CONFIG: json.dumps(config, indent=2, sort_keys=True)})
    return f"the scale is in the header ({CONFIG}); diffusers of before June 2025 does not look there"


def _lora_config(patch: Patch) -> dict[str, Any]:
    """Return the patch's settings, layers by full names, because diffusers passes them to PEFT's LoraConfig."""
    method = next(iter(patch.layers.values())).method
    return config_json(
        {name: (layer.rank, layer.alpha) for name, layer in patch.layers.items()}, method=method,
        dropout=patch.config.dropout, base_model=patch.config.base_model, revision=patch.config.revision,
        task_type=patch.config.raw.get("task_type"), fan_in_fan_out=bool(patch.config.raw.get("fan_in_fan_out")),
    )  # fmt: skip


def _header(file: SafetensorsFile) -> dict[str, Any]:
    try:
        header = json.loads(file.metadata.get(CONFIG, "{}"))
    except (ValueError, RecursionError) as problem:
        raise PatchError(f"{file.path}: {CONFIG} in the header is not valid JSON: {problem}") from None
    if not isinstance(header, dict):
        raise PatchError(f"{file.path}: {CONFIG} in the header is not a mapping")
    return header


def _prefix(file: SafetensorsFile, header: Mapping[str, Any], options: Options) -> str:
    """Return the prefix of module names: as requested, from the header, or from the base's names.

    Raises:
        PatchError: there are several components, or names that may begin with one.
    """
    if options.prefix is not None:
        return _with_dot(options.prefix)
    prefixes = sorted(key.removesuffix("r") for key in header if key == "r" or key.endswith(".r"))
    firsts = sorted({first for key in file.entries if (first := key.partition(".")[0]) in COMPONENTS})
    if len(prefixes) == 1 and all(key.startswith(prefixes[0]) for key in file.entries):
        return prefixes[0]
    if not prefixes and not firsts:
        return ""
    if not prefixes and options.base is not None:  # the base decides, because GPT-2's own names begin with transformer.
        known = tuple(f"{name}." for name in options.base.shapes.layers)
        for prefix in ("", *(f"{first}." for first in firsts)):
            if all(key.removeprefix(prefix).startswith(known) for key in file.entries):
                return prefix
    names = ", ".join(sorted({*(name.removesuffix(".") for name in prefixes), *firsts} - {""}))
    raise PatchError(
        f"{file.path}: names begin with the components of a pipeline ({names}); say which one's adapter is meant"
        " (--prefix, in Python prefix=), or that this is part of the layer's own name (--prefix '', in Python"
        " prefix='')"
    )


def _parse_header_config(
    file: SafetensorsFile, settings: Mapping[str, Any], keys: Keys, pairs: Mapping[str, FactorPair]
) -> PatchConfig:
    """Parse the LoraConfig in the header.

    Raises:
        PatchError: the config does not describe these tensors.
    """
    stray = next((parts["alpha"] for parts in keys.values() if "alpha" in parts), None)
    if stray is not None:
        raise PatchError(
            f"{file.path}: {stray}: the header has a LoraConfig too, and diffusers takes one of both; drop one"
        )
    config = parse_config(file.path, {"peft_type": "LORA", **settings})
    if config.modules_to_save:
        raise PatchError(
            f"{file.path}: modules_to_save names {config.modules_to_save}; diffusers' format does not hold them"
        )
    for name, pair in pairs.items():
        if config.rank_of(name) != pair.rank:
            raise PatchError(f"{file.path}: {name}: rank {pair.rank}, and the header says {config.rank_of(name)}")
    return config


def _alphas(file: SafetensorsFile, keys: Keys, pairs: Mapping[str, FactorPair]) -> dict[str, float]:
    """Return the alphas of all layers; without any, each layer's rank.

    Raises:
        PatchError: an alpha is missing or zero, or there is none and ranks differ. diffusers reads such files in ways
        of its own.
    """
    alphas = {name: read_scalar(file, parts["alpha"]) for name, parts in keys.items() if "alpha" in parts}
    for name in pairs if alphas else ():
        if name not in alphas:
            raise PatchError(f"{file.path}: {name} has no alpha, and others have one; write {name}.alpha")
        if alphas[name] == 0:
            raise PatchError(f"{file.path}: {name}.alpha is zero, and so is the scale; leave the layer out")
    ranks = sorted({pair.rank for pair in pairs.values()})
    if not alphas and len(ranks) > 1:
        raise PatchError(
            f"{file.path}: layers of ranks {ranks} and no alpha: diffusers would give all of them the first one's rank;"
            " write an alpha for every layer"
        )
    return alphas or {name: float(pair.rank) for name, pair in pairs.items()}


def _with_dot(prefix: str) -> str:
    return prefix if prefix.endswith(".") or not prefix else f"{prefix}."
