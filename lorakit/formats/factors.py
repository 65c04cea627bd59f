"""Read the factors A (r, in) and B (out, r) of a foreign file, and convert scales to alphas exactly.

A format is a table of suffixes: ``{".lora_down.weight": "lora_A", ...}``. Every key of a file is read or refused. kohya
and loralib store alpha, s = alpha / r; MLX stores s. A scale that a format would round is refused.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from lorakit.errors import PatchError
from lorakit.files.safetensors import SafetensorsFile
from lorakit.lora.methods import METHODS
from lorakit.patch import Caps, PatchLayer
from lorakit.patch.patch import FLOATS

Suffixes = Mapping[str, str]
"""suffix of a key -> part: ``lora_A``, ``lora_B``, ``alpha`` or ``bias``"""
Keys = dict[str, dict[str, str]]
"""name of the module in the file -> part -> key"""
FACTORS: Final = ("lora_A", "lora_B")
PLAIN: Final = ("lora", "rslora")
"""the methods that are s B A and nothing else, which every format can store"""
VARIANTS: Final = {
    r"\.(dora_scale|lora_magnitude_vector)\b": "DoRA",
    r"\.hada_": "LoHa",
    r"\.lokr_": "LoKr",
    r"\.lora_mid\.": "LoRA with a third factor (Tucker)",
    r"\.oft_": "OFT",
    r"\.diff(_b)?$": "a full difference",
    r"\.lora(_up|_down|_A|_B|\.up|\.down|_linear_layer\.up|_linear_layer\.down)\.bias$": "LoRA with a bias of its own",
    r"\.lora_embedding_[AB]$": "an embedding's update",
}


@dataclass(frozen=True)
class FactorPair:
    """The two factors of one layer: A (r, in), B (out, r)."""

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
    """Group the keys under ``prefix`` by module and part.

    Raises:
        PatchError: a key is not of this format, two keys are the same part, or no key has the prefix.
    """
    keys: Keys = {}
    for key in file.entries:
        if not key.startswith(prefix):
            continue
        suffix = next((suffix for suffix in suffixes if key.endswith(suffix)), None)
        name = key.removeprefix(prefix).removesuffix(suffix or "")
        if suffix is None or not name:
            raise unknown_key_error(file, key, suffixes)
        parts = keys.setdefault(name, {})
        if suffixes[suffix] in parts:
            raise PatchError(f"{file.path}: {key} and {parts[suffixes[suffix]]} are the same part of one layer")
        parts[suffixes[suffix]] = key
    if not keys:
        raise PatchError(
            f"{file.path}: no tensor's name begins with {prefix!r}; the first is {next(iter(file.entries), None)!r}"
        )
    return keys


def unknown_key_error(file: SafetensorsFile, key: str, suffixes: Suffixes) -> PatchError:
    """Return the error for a key that belongs to no plain low-rank update."""
    kind = variant(key)
    if kind is None:
        return PatchError(f"{file.path}: {key}: a tensor this format does not have; it has {', '.join(suffixes)}")
    return PatchError(
        f"{file.path}: {key}: {kind}, which this conversion cannot express;"
        " the program that made it can merge it into its base"
    )


def variant(key: str) -> str | None:
    """Return the known kind of adapter with more than A and B that a key belongs to; None for any other key."""
    return next((kind for pattern, kind in VARIANTS.items() if re.search(pattern, key)), None)


def read_pairs(file: SafetensorsFile, keys: Keys, *, transposed: bool = False) -> dict[str, FactorPair]:
    """Read the factors of every layer, values and dtypes as stored. ``transposed``: stored as (in, r) and (r, out).

    Raises:
        PatchError: a factor is missing, not a matrix, not finite, not a float, or the two have different ranks.
    """
    pairs = {}
    for name, parts in keys.items():
        for factor, other in (FACTORS, FACTORS[::-1]):
            if factor not in parts:
                known = parts.get(other) or next(iter(parts.values()))
                raise PatchError(f"{file.path}: {known}: the other half of {name} ({factor}) is missing; save it again")
        a, b = (_matrix(file, parts[factor], transposed=transposed) for factor in FACTORS)
        pair = FactorPair(a, b)
        if a.shape[0] != b.shape[1]:
            raise PatchError(
                f"{file.path}: {parts['lora_A']} has rank {a.shape[0]} and {parts['lora_B']} has rank {b.shape[1]};"
                " the two halves are not of one layer"
            )
        if pair.rank > Caps().rank:
            raise PatchError(f"{file.path}: {parts['lora_A']}: rank {pair.rank}, {Caps().rank} is allowed (Caps.rank)")
        pairs[name] = pair
    return pairs


def read_checked(file: SafetensorsFile, key: str) -> Tensor:
    """Read a tensor of finite 16, 32 or 64 bit floats.

    Raises:
        PatchError: the tensor has another dtype, or a value is not finite.
    """
    if file.entries[key].dtype not in FLOATS:
        raise PatchError(f"{file.path}: {key}: {file.entries[key].dtype}; it has to be 16, 32 or 64 bit floats")
    tensor = file.read(key)
    if not torch.isfinite(tensor).all():
        raise PatchError(f"{file.path}: {key} holds values that are not finite; the training went wrong")
    return tensor


def read_scalar(file: SafetensorsFile, key: str) -> float:
    """Read the number in a tensor of one element, such as an alpha.

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


def exact_alpha(scale: float, rank: int, methods: Iterable[str] = PLAIN) -> tuple[str, float] | None:
    """Return (method, alpha) with exactly this scale in float64; None if no alpha gives it.

    For r = 3 the division skips some values of s. Of several alphas, the shortest in decimal digits is returned.
    """
    for method in methods:
        guess = scale / METHODS[method].scale(1.0, rank)
        for alpha in sorted(_neighbours(guess), key=lambda number: len(repr(number))):
            if METHODS[method].scale(alpha, rank) == scale:
                return method, alpha
    return None


def divided_alpha(layer: PatchLayer) -> float | None:
    """Return the alpha with alpha / r equal to the layer's scale, for any method; None if there is none."""
    if layer.method == "lora":
        return float(layer.alpha)
    exact = exact_alpha(layer.scale, layer.rank, ["lora"])
    return exact and exact[1]


def _neighbours(number: float) -> list[float]:
    """Return the number and two neighbours on either side, because the guess has been rounded twice."""
    below, above = math.nextafter(number, 0.0), math.nextafter(number, math.inf)
    return [number, below, above, math.nextafter(below, 0.0), math.nextafter(above, math.inf)]


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
