"""Read and write kohya's files (sd-scripts): flattened names, and an alpha for every layer.

``<prefix><module with _ for .>.lora_down.weight`` is A, ``.lora_up.weight`` is B; s = alpha / r. A missing or zero
``.alpha`` means r. Reading needs the base, because several module names may flatten to one.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import torch

from lorakit.errors import PatchError, did_you_mean
from lorakit.files.safetensors import SafetensorsFile
from lorakit.formats.adapter import (
    Base,
    ForeignAdapter,
    Options,
    refuse_embeddings,
    refuse_full_tensors,
    write_single,
)
from lorakit.formats.factors import FactorPair, Suffixes, divided_alpha, group_keys, read_pairs, read_scalar
from lorakit.formats.metadata import ConversionSource, metadata_of
from lorakit.lora.layer_kinds import EMBEDDING
from lorakit.patch import Patch

SUFFIXES: Final[Suffixes] = {".lora_down.weight": "lora_A", ".lora_up.weight": "lora_B", ".alpha": "alpha"}
PREFIXES: Final = ("lora_unet_", "lora_te_", "lora_te1_", "lora_te2_", "lora_te3_", "lora_transformer_")
"""prefix of each model of a pipeline: U-Net, text encoders, transformer"""
DEFAULT_PREFIX: Final = "lora_te_"
FLAT: Final = ("lora_", "lycoris_")
"""prefixes of flattened names"""


def read_kohya(file: SafetensorsFile, options: Options) -> ForeignAdapter:
    """Read the layers of a kohya file, by the base's names.

    Raises:
        PatchError: no base, a name that does not match exactly one of its linear layers, or a damaged pair.
    """
    if options.base is None:
        raise PatchError(
            f"{file.path}: kohya's names are flattened (model_layers_0_ for model.layers.0.), and only the base tells"
            " what they were; name it (--base, in Python base=)"
        )
    prefix = _prefix(file, options.prefix)
    keys = group_keys(file, SUFFIXES, prefix)
    pairs = read_pairs(file, keys)
    modules = _modules(file, prefix, pairs, options.base)
    alphas = {name: read_scalar(file, parts["alpha"]) for name, parts in keys.items() if "alpha" in parts}
    return ForeignAdapter(
        file,
        {modules[name]: pair for name, pair in pairs.items()},
        {modules[name]: alphas.get(name) or float(pair.rank) for name, pair in pairs.items()},
    )


def write_kohya(out: Path, patch: Patch, options: Options, origin: ConversionSource) -> str:
    """Write one file with a float32 alpha for every layer.

    Raises:
        PatchError: two names flatten to one, float32 would round an alpha, or the patch has more than linear layers.
    """
    refuse_full_tensors(patch, "kohya")
    refuse_embeddings(patch, "kohya")
    prefix = DEFAULT_PREFIX if options.prefix is None else _with_underscore(options.prefix)
    names = _flattened(_linear(options.base) if options.base else patch.layers)
    tensors = {}
    for module, layer in patch.layers.items():
        name = _flat(module)
        if len(names.get(name, [module])) > 1:
            raise PatchError(f"{patch.folder}: {' and '.join(names[name])} are both {name} in kohya's names")
        alpha = divided_alpha(layer)
        if alpha is None or float(torch.tensor(alpha, dtype=torch.float32)) != alpha:
            raise PatchError(
                f"{patch.folder}: {module}: no float32 alpha divided by rank {layer.rank} is its scale {layer.scale!r}"
                f" ({layer.method}, alpha {layer.alpha}); diffusers' format can hold it"
            )
        tensors[f"{prefix}{name}.lora_down.weight"] = layer.tensors["lora_A"]
        tensors[f"{prefix}{name}.lora_up.weight"] = layer.tensors["lora_B"]
        tensors[f"{prefix}{name}.alpha"] = torch.tensor(alpha, dtype=torch.float32)
    write_single(out, tensors, metadata_of(patch, origin))
    return f"names begin with {prefix}"


def is_kohya_name(name: str) -> bool:
    """True if a key without its suffix is a flattened name."""
    return name.startswith(FLAT) and "." not in name


def _prefix(file: SafetensorsFile, requested: str | None) -> str:
    if requested is not None:
        return _with_underscore(requested)
    prefix_of = {key: next((prefix for prefix in PREFIXES if key.startswith(prefix)), None) for key in file.entries}
    unknown = [key for key, prefix in prefix_of.items() if prefix is None]
    if unknown:
        raise PatchError(
            f"{file.path}: {unknown[0]}: none of {', '.join(PREFIXES)}; say what is before the name"
            " (--prefix, in Python prefix=)"
        )
    several = sorted({str(prefix) for prefix in prefix_of.values()})
    if len(several) != 1:
        raise PatchError(
            f"{file.path}: holds the adapters of several models ({', '.join(several)}); say which one"
            " (--prefix, in Python prefix=)"
        )
    return several[0]


def _modules(file: SafetensorsFile, prefix: str, names: Mapping[str, FactorPair], base: Base) -> dict[str, str]:
    """Return flattened name -> module.

    Raises:
        PatchError: no module of the base flattens to a name, or several do.
    """
    known = _flattened(_linear(base))
    modules = {}
    for name in names:
        matches = known.get(name, [])
        if not matches:
            raise PatchError(
                f"{file.path}: {prefix}{name}: no linear layer of {base.name} flattens to {name}."
                f"{did_you_mean(name, known)}"
            )
        if len(matches) > 1:
            raise PatchError(f"{file.path}: {prefix}{name}: several layers of {base.name}: {', '.join(matches)}")
        modules[name] = matches[0]
    return modules


def _linear(base: Base) -> list[str]:
    return [name for name, (kind, _) in base.shapes.layers.items() if kind is not EMBEDDING]


def _flattened(modules: Iterable[str]) -> dict[str, list[str]]:
    flattened: dict[str, list[str]] = {}
    for module in modules:
        flattened.setdefault(_flat(module), []).append(module)
    return flattened


def _flat(module: str) -> str:
    return module.replace(".", "_")


def _with_underscore(prefix: str) -> str:
    return prefix if prefix.endswith("_") or not prefix else f"{prefix}_"
