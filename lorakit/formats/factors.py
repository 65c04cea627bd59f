"""The factors in a foreign file: keys to pairs of A (r, in) and B (out, r), each one checked and none left over.

A format is a table of suffixes: ``{".lora_down.weight": "lora_A", ...}``.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from lorakit.errors import PatchError
from lorakit.files.safetensors import SafetensorsFile
from lorakit.patch import Caps
from lorakit.patch.patch import FLOATS

Suffixes = Mapping[str, str]
"""end of a key -> part: ``lora_A``, ``lora_B``, ``alpha`` or ``bias``"""
Keys = dict[str, dict[str, str]]
"""module's name in the file -> part -> key"""
HALVES: Final = ("lora_A", "lora_B")
VARIANTS: Final = {
    r"\.(dora_scale|lora_magnitude_vector)\b": "DoRA",
    r"\.hada_": "LoHa",
    r"\.lokr_": "LoKr",
    r"\.lora_mid\.": "LoRA with a third factor (Tucker)",
    r"\.oft_": "OFT",
    r"\.diff(_b)?$": "a whole difference",
    r"\.lora(_up|_down|_A|_B|\.up|\.down|_linear_layer\.up|_linear_layer\.down)\.bias$": "LoRA with a bias of its own",
    r"\.lora_embedding_[AB]$": "an embedding's update",
}


@dataclass(frozen=True)
class FactorPair:
    """The two factors of one layer, in lorakit's layout: A (r, in), B (out, r)."""

    A: Tensor
    B: Tensor
    embedding: bool = False

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"lora_A": self.A, "lora_B": self.B}

    @property
    def rank(self) -> int:
        return self.A.shape[0]

    @property
    def sizes(self) -> tuple[int, int]:
        return self.B.shape[0], self.A.shape[1]


def group_keys(file: SafetensorsFile, suffixes: Suffixes, prefix: str = "") -> Keys:
    """Every key under ``prefix``, by name and part.

    Raises:
        PatchError: a key the format does not have, two for one part, or none at all.
    """
    found: Keys = {}
    for key in file.entries:
        if not key.startswith(prefix):
            continue
        suffix = next((suffix for suffix in suffixes if key.endswith(suffix)), None)
        name = key.removeprefix(prefix).removesuffix(suffix or "")
        if suffix is None or not name:
            raise unknown_key_error(file, key, suffixes)
        parts = found.setdefault(name, {})
        if suffixes[suffix] in parts:
            raise PatchError(f"{file.path}: {key} and {parts[suffixes[suffix]]} are the same part of one layer")
        parts[suffixes[suffix]] = key
    if not found:
        raise PatchError(
            f"{file.path}: no tensor's name begins with {prefix!r}; the first is {next(iter(file.entries), None)!r}"
        )
    return found


def unknown_key_error(file: SafetensorsFile, key: str, suffixes: Suffixes) -> PatchError:
    """The refusal of a key that is no factor of a plain update."""
    kind = variant(key)
    if kind is None:
        return PatchError(f"{file.path}: {key}: a tensor this format does not have; it has {', '.join(suffixes)}")
    return PatchError(
        f"{file.path}: {key}: {kind}, which this conversion cannot express;"
        " the program that made it can merge it into its base"
    )


def variant(key: str) -> str | None:
    """What kind of adapter a key belongs to, when it is a known one that is more than A and B."""
    return next((kind for pattern, kind in VARIANTS.items() if re.search(pattern, key)), None)


def read_pairs(file: SafetensorsFile, found: Keys, *, transposed: bool = False) -> dict[str, FactorPair]:
    """The factors of every layer, values and dtypes as stored. ``transposed``: stored as (in, r) and (r, out).

    Raises:
        PatchError: a half that is missing, no matrix, not finite, not a float, or of another rank than the other.
    """
    pairs = {}
    for name, keys in found.items():
        for half, other in (HALVES, HALVES[::-1]):
            if half not in keys:
                known = keys.get(other) or next(iter(keys.values()))
                raise PatchError(f"{file.path}: {known}: the other half of {name} ({half}) is missing; save it again")
        a, b = (_matrix(file, keys[half], transposed=transposed) for half in HALVES)
        pair = FactorPair(a, b)
        if a.shape[0] != b.shape[1]:
            raise PatchError(
                f"{file.path}: {keys['lora_A']} has rank {a.shape[0]} and {keys['lora_B']} has rank {b.shape[1]};"
                " the two halves are not of one layer"
            )
        if pair.rank > Caps().rank:
            raise PatchError(f"{file.path}: {keys['lora_A']}: rank {pair.rank}, {Caps().rank} is allowed (Caps.rank)")
        pairs[name] = pair
    return pairs


def read_checked(file: SafetensorsFile, key: str) -> Tensor:
    """A tensor of 16, 32 or 64 bit floats, all finite.

    Raises:
        PatchError: it is something else.
    """
    if file.entries[key].dtype not in FLOATS:
        raise PatchError(f"{file.path}: {key}: {file.entries[key].dtype}; it has to be 16, 32 or 64 bit floats")
    tensor = file.read(key)
    if not torch.isfinite(tensor).all():
        raise PatchError(f"{file.path}: {key} holds values that are not finite; the training went wrong")
    return tensor


def read_scalar(file: SafetensorsFile, key: str) -> float:
    """The number in a tensor of one element, such as an alpha.

    Raises:
        PatchError: more than one element, or not a finite number that is zero or more.
    """
    entry = file.entries[key]
    if math.prod(entry.shape) != 1 or entry.dtype.is_complex or entry.dtype is torch.bool:
        raise PatchError(f"{file.path}: {key}: {entry.dtype} of shape {entry.shape}; it has to be one number")
    value = float(file.read(key).item())
    if not 0 <= value < math.inf:
        raise PatchError(f"{file.path}: {key} is {value}; it has to be a positive number")
    return value


def _matrix(file: SafetensorsFile, key: str, *, transposed: bool) -> Tensor:
    shape = file.entries[key].shape
    if len(shape) == 4:
        raise PatchError(
            f"{file.path}: {key}: shape {shape} is a convolution's, and lorakit adapts linear layers;"
            " the program that made it can merge it into its base"
        )
    if len(shape) != 2 or 0 in shape:
        raise PatchError(f"{file.path}: {key}: shape {shape} is not that of a matrix with values")
    tensor = read_checked(file, key)
    return tensor.T.contiguous() if transposed else tensor
