"""diffusers' files: dotted names, and the whole LoraConfig in the header, or an alpha for every layer.

Four spellings of the factors are read; ``<component>.<module>.lora_A.weight`` with the LoraConfig is written, as
diffusers itself does. Without either, every rank being r, s = 1.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lorakit.errors import PatchError
from lorakit.files.safetensors import SafetensorsFile
from lorakit.formats.adapter import ForeignAdapter
from lorakit.formats.factors import FactorPair, Keys, Suffixes, group_keys, read_pairs, read_scalar
from lorakit.formats.metadata import ConversionSource, metadata_of
from lorakit.formats.options import Options
from lorakit.formats.places import refuse_embeddings, refuse_full_tensors, write_single
from lorakit.formats.scales import PLAIN
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
"""the models of a pipeline, which begin its names"""
CONFIG: Final = "lora_adapter_metadata"
"""where the LoraConfig is in the header's metadata, each key behind its component"""


def read_diffusers(file: SafetensorsFile, options: Options) -> ForeignAdapter:
    """The layers of a diffusers file, of one component.

    Raises:
        PatchError: several components and no ``prefix``, an alpha that diffusers would not give every layer, or a
        damaged pair.
    """
    header = _header(file)
    prefix = _prefix(file, header, options)
    found = group_keys(file, SUFFIXES, prefix)
    pairs = read_pairs(file, found)
    settings = {key.removeprefix(prefix): value for key, value in header.items() if key.startswith(prefix)}
    if header and not settings:
        raise PatchError(
            f"{file.path}: {CONFIG} in the header says nothing of {prefix!r}, so there is no scale to read"
        )
    if settings:
        config = _config(file, settings, found, pairs)
        if config.method not in PLAIN:
            raise PatchError(f"{file.path}: use_dora in the header: magnitudes of DoRA are not converted")
        alphas = {name: config.alpha_of(name) for name in pairs}
        return ForeignAdapter(file, pairs, alphas, method=config.method, dropout=config.dropout)
    return ForeignAdapter(file, pairs, _alphas(file, found, pairs))


def write_diffusers(out: Path, patch: Patch, options: Options, origin: ConversionSource) -> str:
    """One file with the LoraConfig in its header, which holds every scale exactly.

    Raises:
        PatchError: anything but updates of linear layers.
    """
    refuse_full_tensors(patch, "diffusers")
    refuse_embeddings(patch, "diffusers")
    prefix = _ended(options.prefix or "")
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
    """The patch's settings, its layers by their whole names: diffusers passes all of it to PEFT's LoraConfig."""
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
    """What is before the module names: as asked, as the header says, or as the base's own names show."""
    if options.prefix is not None:
        return _ended(options.prefix)
    told = sorted(key.removesuffix("r") for key in header if key == "r" or key.endswith(".r"))
    firsts = sorted({first for key in file.entries if (first := key.partition(".")[0]) in COMPONENTS})
    if len(told) == 1 and all(key.startswith(told[0]) for key in file.entries):
        return told[0]
    if not told and not firsts:
        return ""
    if not told and options.base is not None:  # GPT-2's own names begin with transformer.
        known = tuple(f"{name}." for name in options.base.shapes.layers)
        for prefix in ("", *(f"{first}." for first in firsts)):
            if all(key.removeprefix(prefix).startswith(known) for key in file.entries):
                return prefix
    names = ", ".join(sorted({*(name.removesuffix(".") for name in told), *firsts} - {""}))
    raise PatchError(
        f"{file.path}: names begin with the components of a pipeline ({names}); say which one's adapter is meant"
        " (prefix=), or that this is part of the layer's own name (prefix='')"
    )


def _config(
    file: SafetensorsFile, settings: Mapping[str, Any], found: Keys, pairs: Mapping[str, FactorPair]
) -> PatchConfig:
    """The LoraConfig in the header; it has to be that of these tensors."""
    stray = next((keys["alpha"] for keys in found.values() if "alpha" in keys), None)
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


def _alphas(file: SafetensorsFile, found: Keys, pairs: Mapping[str, FactorPair]) -> dict[str, float]:
    """An alpha for every layer, or none at all and one rank: anything between, diffusers reads in ways of its own."""
    alphas = {name: read_scalar(file, keys["alpha"]) for name, keys in found.items() if "alpha" in keys}
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


def _ended(prefix: str) -> str:
    return prefix if prefix.endswith(".") or not prefix else f"{prefix}."
