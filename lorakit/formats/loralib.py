"""Read and write loralib's state dict: ``<module>.lora_A`` (r, in), ``<module>.lora_B`` (out, r) and biases.

s = alpha / r, with one alpha for all layers. loralib keeps alpha in code, so the caller gives it, or lorakit's metadata
does. An embedding's tensors look like a linear layer's, so the base decides which one a layer is.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Final

from torch import Tensor

from lorakit.errors import PatchError
from lorakit.files.safetensors import SafetensorsFile
from lorakit.formats.adapter import ForeignAdapter, Options, refuse_full_tensors, write_single
from lorakit.formats.factors import Suffixes, divided_alpha, group_keys, read_checked, read_pairs
from lorakit.formats.metadata import ConversionSource, metadata_of
from lorakit.lora.layer_kinds import EMBEDDING
from lorakit.patch import Patch

SUFFIXES: Final[Suffixes] = {".lora_A": "lora_A", ".lora_B": "lora_B", ".bias": "bias"}
EMBEDDING_NAME: Final = re.compile(r"emb|wte|wpe")


def read_loralib(file: SafetensorsFile, options: Options) -> ForeignAdapter:
    """Read the layers of a loralib file, and its biases.

    Raises:
        PatchError: no alpha, or another than in lorakit's metadata; a name that may be an embedding's, without a base;
        or a damaged pair.
    """
    keys = group_keys(file, SUFFIXES)
    biases = {f"{name}.bias": read_checked(file, parts.pop("bias")) for name, parts in keys.items() if "bias" in parts}
    pairs = read_pairs(file, {name: parts for name, parts in keys.items() if parts})
    plain = ForeignAdapter(file, pairs, {}, biases=biases)
    marked = {name: replace(pair, embedding=_is_embedding(plain, name, options)) for name, pair in pairs.items()}
    return ForeignAdapter(file, marked, dict.fromkeys(pairs, _alpha(plain, options)), biases=biases)


def write_loralib(out: Path, patch: Patch, options: Options, origin: ConversionSource) -> str:
    """Write one file; the returned note states the alpha to create the layers with.

    Raises:
        PatchError: layers have different alphas, no alpha / r equals a scale, or a full tensor is not a bias.
    """
    refuse_full_tensors(patch, "loralib", but=".bias")
    alphas = {name: divided_alpha(layer) for name, layer in patch.layers.items()}
    first, alpha = next(iter(alphas.items()))
    for name, other in alphas.items():
        if other is None:
            layer = patch.layers[name]
            raise PatchError(
                f"{patch.folder}: {name}: no alpha divided by rank {layer.rank} is its scale {layer.scale!r}"
            )
        if other != alpha:
            raise PatchError(
                f"{patch.folder}: {first} has alpha {alpha} and {name} has {other}; a loralib file holds none, and"
                " one is given for all. diffusers' format can hold them"
            )
    tensors: dict[str, Tensor] = dict(patch.full_tensors)
    tensors |= {f"{name}.{part}": t for name, layer in patch.layers.items() for part, t in layer.tensors.items()}
    write_single(out, tensors, metadata_of(patch, origin, lora_alpha=alpha))
    return f"make the layers with lora_alpha={alpha}: the file itself has no place for it"


def _alpha(adapter: ForeignAdapter, options: Options) -> float:
    path, stored = adapter.file.path, adapter.original.lora_alpha if adapter.original else None
    if options.alpha is not None and stored is not None and stored != options.alpha:
        raise PatchError(f"{path}: alpha {options.alpha} is given, and the file says {stored}; leave it out")
    alpha = stored if options.alpha is None else options.alpha
    if alpha is None:
        raise PatchError(
            f"{path}: a loralib file does not hold its alpha; give the lora_alpha of its layers"
            " (--alpha, in Python alpha=)"
        )
    return alpha


def _is_embedding(adapter: ForeignAdapter, name: str, options: Options) -> bool:
    if options.base is not None:
        return name in options.base.shapes.layers and options.base.shapes.layers[name][0] is EMBEDDING
    if adapter.original is not None:
        return name in adapter.original.embeddings
    if EMBEDDING_NAME.search(name):
        raise PatchError(
            f"{adapter.file.path}: {name}: may be an embedding or a linear layer; the base tells"
            " (--base, in Python base=)"
        )
    return False
