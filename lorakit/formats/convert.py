"""Convert an adapter between PEFT's form and mlx-lm's, exactly or not at all, and check that it fits its base.

mlx-lm's folders have A and B transposed, ``<module>.lora_a`` (in, r) and ``<module>.lora_b`` (r, out), and one scale
and rank in the config: y = x W^T + scale (x lora_a) lora_b. mlx-lm adapts layers by their names below ``layers.N.``, in
the last ``num_layers`` blocks. It stores s where PEFT stores alpha, s = alpha / r: a scale that no alpha
gives is refused.
"""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn

from lorakit.base.find import find_base
from lorakit.base.transformers_io import load_skeleton
from lorakit.errors import BaseModelError, PatchError, check_absent, translate_error
from lorakit.files.atomic import atomic_folder, digest, write_json
from lorakit.files.base_files import read_json
from lorakit.files.safetensors import SafetensorsFile, file_parts, open_tensors
from lorakit.files.text import Say
from lorakit.lora.methods import METHODS
from lorakit.patch import BaseShapes, Patch, PatchLayer, check_fits, new_patch, read_patch, write_new_patch
from lorakit.patch.adapter_config import CONFIG_FILE
from lorakit.patch.patch import FLOATS, TENSOR_FILE, check_plain
from lorakit.patch.read import MAX_PATCH_BYTES, MAX_PATCH_HEADER_BYTES
from lorakit.version import VERSION

FORMATS: Final = ("peft", "mlx")
FACTORS: Final = {".lora_a": "lora_A", ".lora_b": "lora_B"}
MLX_TENSOR_FILE: Final = "adapters.safetensors"
LAYER: Final = re.compile(r"((?:.*?\.)?layers)\.\d+\.(.+)")
ALL_LAYERS: Final = -1  # mlx-lm's value of num_layers for all


def convert(
    source: str | Path,
    out: str | Path,
    *,
    to: str = "peft",
    base: str | Path | None = None,
    revision: str | None = None,
    say: Say = lambda text: None,
) -> Path:
    """Write the adapter in the folder ``source`` in the other program's form; returns the folder ``out``.

    Every value keeps its bits and every layer its scale, or nothing is written. ``to``: ``peft`` or ``mlx``. ``base``:
    a folder, a hub id (with ``revision``) or builtin:tiny, against which the adapter is checked.
    Raises PatchError if the source is damaged or ``to`` cannot store it exactly; BaseModelError, TemporaryFailure.
    """
    source = Path(source)
    out = Path(out)
    if to not in FORMATS:
        raise PatchError(f"to: {to!r} is none of {', '.join(FORMATS)}; other programs read adapters of PEFT's form")
    check_absent(out, "out", PatchError)
    if base is None and revision is not None:
        raise PatchError(f"revision: {revision!r} of no base; name the base too (--base, in Python base=)")
    if not source.is_dir():
        missing = "" if source.exists() else "no such folder; "
        raise PatchError(f"{source}: {missing}an adapter of PEFT or mlx-lm is a folder; name the folder")
    form = "mlx" if (source / MLX_TENSOR_FILE).exists() else "peft"
    if form == "mlx" and (source / TENSOR_FILE).exists():
        raise PatchError(f"{source}: has {TENSOR_FILE} of PEFT and {MLX_TENSOR_FILE} of mlx-lm; name a folder with one")
    if form == to:
        raise PatchError(f"to: this is a {form} adapter already; nothing would change")
    skeleton = None if base is None else load_skeleton(find_base(str(base), revision))
    patch = read_patch(source) if form == "peft" else read_mlx(source, base, revision, skeleton)
    if skeleton is not None:
        check_fits(patch, BaseShapes.of(skeleton), str(base))
    if not patch.layers:
        raise PatchError(f"{source}: holds no updates of layers; there is nothing to convert")
    if to == "peft":
        write_new_patch(out, patch)
        note = "its base is not known by its values: an mlx-lm folder holds none of its digests"
    else:
        check_plain(patch, f"converting to {to}")
        write_mlx(out, patch)
        note = "names are the base's own; mlx-lm uses the same for models like Llama, Qwen, Mistral and Gemma"
    say(f"{out}: {len(patch.layers)} layers, from {form} to {to}; {note}")
    return out


def read_mlx(folder: Path, base: str | Path | None, revision: str | None, skeleton: nn.Module | None) -> Patch:
    """Read an mlx-lm folder as a patch of ``base``, whose model is ``skeleton``; None if the base is not known."""
    path = folder / CONFIG_FILE
    file = open_tensors(folder / MLX_TENSOR_FILE, MAX_PATCH_HEADER_BYTES, MAX_PATCH_BYTES)
    rank, scale, dropout = _read_config(path)
    factors = _read_factors(file)
    for name, pair in factors.items():
        ranks = pair["lora_A"].shape[0], pair["lora_B"].shape[1]
        if ranks != (rank, rank):
            a, b = ranks
            raise PatchError(f"{file.path}: {name}: lora_a has rank {a}, lora_b {b}, {path} says {rank} for all layers")
    if (method_and_alpha := exact_alpha(scale, rank)) is None:
        nearest = scale * rank / rank
        raise PatchError(f"{path}: scale {scale!r}: no alpha gives it at rank {rank}; the nearest is {nearest!r}")
    method, alpha = method_and_alpha
    layers = {
        name: PatchLayer(method, rank, alpha, (len(pair["lora_B"]), pair["lora_A"].shape[1]), pair)
        for name, pair in factors.items()
    }
    with translate_error(PatchError, PatchError, f"{folder}"):
        patch = new_patch(
            layers,
            metadata={"lorakit": VERSION, "converted": {"from": "mlx", "source_sha256": digest(file.path)}},
            dropout=dropout,
            base_model=None if base is None else str(base),
            revision=revision,
            all_modules=None if skeleton is None else [name for name, _ in skeleton.named_modules()],
            task_type=None if skeleton is None else "CAUSAL_LM",
        )
    return replace(patch, folder=folder)


def write_mlx(out: Path, patch: Patch) -> None:
    """Write a folder that mlx-lm loads with ``--adapter-path``, or raise PatchError for what it cannot hold."""
    embeddings = [name for name, layer in patch.layers.items() if layer.embedding]
    for names, kind in ((list(patch.full_shapes), "a full tensor of the base"), (embeddings, "an embedding")):
        if names:
            raise PatchError(f"{patch.folder}: {names[0]} is {kind}, and mlx-lm has no place for it; merge it instead")
    first, model = next(iter(patch.layers.items()))
    keys = set[str]()
    stack = None  # mlx-lm adapts layers below one `layers.N.` alone
    for name, layer in patch.layers.items():
        match = LAYER.fullmatch(name)
        if match is None or match[1] != (stack or match[1]):
            where = f"{stack}.N." if stack else "layers.N."
            raise PatchError(f"{patch.folder}: {name} is not below {where}, and mlx-lm adapts nothing else; omit it")
        stack = match[1]
        keys.add(match[2])
        if (layer.scale, layer.rank) != (model.scale, model.rank):
            one = f"{first} has scale {model.scale!r} and rank {model.rank}"
            other = f"{name} has {layer.scale!r} and {layer.rank}"
            raise PatchError(f"{patch.folder}: {one}, {other}; mlx-lm has one of both for all layers. Merge it instead")
    parameters = {"rank": model.rank, "scale": model.scale, "dropout": patch.config.dropout, "keys": sorted(keys)}
    config = {"fine_tune_type": "lora", "num_layers": ALL_LAYERS, "lora_parameters": parameters}
    tensors = {
        f"{name}{suffix}": layer.tensors[part].T.contiguous()
        for name, layer in patch.layers.items()
        for suffix, part in FACTORS.items()
    }
    with atomic_folder(out) as staging:
        with open(staging / MLX_TENSOR_FILE, "wb") as file:
            file.writelines(file_parts(dict(sorted(tensors.items())), {"format": "mlx"}))
        write_json(staging / CONFIG_FILE, config)


def exact_alpha(scale: float, rank: int) -> tuple[str, float] | None:
    """Return (method, alpha) of exactly this scale in float64, the shortest in digits; None: r = 3 skips some."""
    for method, row in METHODS.items():
        if not row.additive or row.saved_as is not None:
            continue
        guess = scale / row.scale(1.0, rank)  # which has been rounded twice, so two neighbours on either side are tried
        below = math.nextafter(guess, 0.0)
        above = math.nextafter(guess, math.inf)
        near = [guess, below, above, math.nextafter(below, 0.0), math.nextafter(above, math.inf)]
        for alpha in sorted(near, key=lambda number: len(repr(number))):
            if row.scale(alpha, rank) == scale:
                return method, alpha
    return None


def _read_factors(file: SafetensorsFile) -> dict[str, dict[str, Tensor]]:
    """Read A (r, in) and B (out, r) of every layer as stored. Raises PatchError unless they are pairs of matrices."""
    factors: dict[str, dict[str, Tensor]] = {}
    for key, entry in file.entries.items():
        name, dot, suffix = key.rpartition(".")
        if dot + suffix not in FACTORS or not name:
            raise PatchError(f"{file.path}: {key}: a tensor this format does not have; it has {', '.join(FACTORS)}")
        if len(entry.shape) != 2 or 0 in entry.shape:
            raise PatchError(f"{file.path}: {key}: shape {entry.shape} is not that of a matrix with values")
        if entry.dtype not in FLOATS:
            raise PatchError(f"{file.path}: {key}: {entry.dtype}; it has to be 16, 32 or 64 bit floats")
        factors.setdefault(name, {})[FACTORS[dot + suffix]] = file.read(key).T.contiguous()
    for name, pair in factors.items():
        for suffix, part in FACTORS.items():
            if part not in pair:
                raise PatchError(f"{file.path}: {name}{suffix} is missing, the other half of {name}; save it again")
    return factors


def _read_config(path: Path) -> tuple[int, float, float]:
    """Return rank, scale and dropout of all layers."""
    try:
        config = read_json(path)
    except BaseModelError as problem:
        raise PatchError(f"{problem}; mlx-lm writes it beside {MLX_TENSOR_FILE}, and it holds the scale") from None
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        raise PatchError(f"{path}: fine_tune_type: {kind!r}; a patch holds 'lora' alone. mlx_lm.fuse merges the others")
    if type(config.get("num_layers")) is not int:
        old = " (lora_layers is of a time when the scale was counted otherwise)" if "lora_layers" in config else ""
        raise PatchError(f"{path}: num_layers is not there{old}; save the adapter with a current mlx-lm")
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise PatchError(f"{path}: lora_parameters is not there, which holds rank and scale")
    given: dict[str, Any] = {"rank": None, "scale": None, "dropout": 0.0, **parameters}
    rank, scale, dropout = (given[key] for key in ("rank", "scale", "dropout"))
    for key, valid, expected in (
        ("rank", type(rank) is int and rank > 0, "a positive whole number"),
        ("dropout", type(dropout) in (int, float), "a number"),
        ("scale", type(scale) in (int, float) and 0 < scale < 1e9, "a positive number"),
    ):
        if not valid:
            raise PatchError(f"{path}: lora_parameters.{key} must be {expected}, got {given[key]!r}")
    return rank, float(scale), float(dropout)
