"""loralib's state dict: ``<module>.lora_A`` (r, in), ``<module>.lora_B`` (out, r) and biases; alpha is in the code.

s = alpha / r, with one alpha for the layers of a model. The file holds neither, so it is given or was kept by lorakit.
An embedding's tensors look like a linear layer's: the base tells them apart.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Final

from torch import Tensor

from lorakit.errors import PatchError
from lorakit.files.safetensors import SafetensorsFile
from lorakit.formats.adapter import ForeignAdapter
from lorakit.formats.factors import Suffixes, group_keys, read_checked, read_pairs
from lorakit.formats.metadata import ConversionSource, metadata_of
from lorakit.formats.options import Options
from lorakit.formats.places import refuse_full_tensors, write_single
from lorakit.formats.scales import divided_alpha
from lorakit.lora.layer_kinds import EMBEDDING
from lorakit.patch import Patch

SUFFIXES: Final[Suffixes] = {".lora_A": "lora_A", ".lora_B": "lora_B", ".bias": "bias"}
LIKE_AN_EMBEDDING: Final = re.compile(r"emb|wte|wpe")


def read_loralib(file: SafetensorsFile, options: Options) -> ForeignAdapter:
    """The layers of a loralib file, and its biases.

    Raises:
        PatchError: no alpha, or another one than lorakit kept; a name that may be an embedding's, and no base; a
        damaged pair.
    """
    found = group_keys(file, SUFFIXES)
    biases = {f"{name}.bias": read_checked(file, keys.pop("bias")) for name, keys in found.items() if "bias" in keys}
    pairs = read_pairs(file, {name: keys for name, keys in found.items() if keys})
    plain = ForeignAdapter(file, pairs, {}, biases=biases)
    marked = {name: replace(pair, embedding=_is_embedding(plain, name, options)) for name, pair in pairs.items()}
    return ForeignAdapter(file, marked, dict.fromkeys(pairs, _alpha(plain, options)), biases=biases)


def write_loralib(out: Path, patch: Patch, options: Options, origin: ConversionSource) -> str:
    """One file; what is returned says the alpha that its layers have to be made with.

    Raises:
        PatchError: layers of different alphas, a scale that no alpha / r is, or whole tensors other than biases.
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


def _alpha(found: ForeignAdapter, options: Options) -> float:
    kept = found.kept.lora_alpha if found.kept else None
    if options.alpha is not None and kept is not None and kept != options.alpha:
        raise PatchError(f"{found.file.path}: alpha {options.alpha} is given, and the file says {kept}; leave it out")
    alpha = kept if options.alpha is None else options.alpha
    if alpha is None:
        raise PatchError(
            f"{found.file.path}: a loralib file does not hold its alpha; give the lora_alpha that the layers were made"
            " with (alpha=)"
        )
    return alpha


def _is_embedding(found: ForeignAdapter, name: str, options: Options) -> bool:
    if options.base is not None:
        return name in options.base.shapes.layers and options.base.shapes.layers[name][0] is EMBEDDING
    if found.kept is not None:
        return name in found.kept.embeddings
    if LIKE_AN_EMBEDDING.search(name):
        raise PatchError(f"{found.file.path}: {name}: may be an embedding or a linear layer; the base tells (base=)")
    return False
