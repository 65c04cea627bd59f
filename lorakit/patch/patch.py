"""A patch: an adapter on disk, in PEFT's own files, knowing its base.

The folder is a patch when it holds ``adapter_config.json``; that file is written last and removed first, so no half
patch is ever visible. lorakit's facts (base fingerprint, recipe, digests, versions) are in the tensor file's metadata.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from lorakit.durable import digest, json_text, sync_folder, write_files
from lorakit.errors import PatchError, nearest
from lorakit.lora.inject import adapted_layers
from lorakit.lora.kinds import Kind
from lorakit.lora.layer import LoraLinear
from lorakit.lora.methods import METHODS
from lorakit.patch.config import CONFIG_FILE, PatchConfig, config_json, parse_config, read_config
from lorakit.patch.tensor_file import open_tensors, write_tensors

TENSOR_FILE: Final = "adapter_model.safetensors"
SIDECAR: Final = "lorakit.json"
PREFIX: Final = "base_model.model."


@dataclass(frozen=True)
class PatchLayer:
    """One layer's update: A (r, in), B (out, r) and the numbers that give s."""

    method: str
    rank: int
    alpha: float
    tensors: Mapping[str, Tensor]

    @property
    def scale(self) -> float:
        return METHODS[self.method].scale(self.alpha, self.rank)


@dataclass(frozen=True)
class Patch:
    """A whole adapter in memory, on the CPU."""

    folder: Path
    config: PatchConfig
    layers: Mapping[str, PatchLayer]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for layer in self.layers.values() for tensor in layer.tensors.values())

    @property
    def made_for(self) -> str:
        return self.config.base_model or "a base without a name"


def read_patch(folder: str | Path) -> Patch:
    """A patch folder written by lorakit or PEFT; all of it or nothing.

    Raises:
        PatchError: cut, altered, foreign, or with a missing, extra, mis-shaped or non-finite tensor.
    """
    folder = Path(folder)
    config = read_config(folder)
    path = folder / TENSOR_FILE
    if not path.exists() and (folder / "adapter_model.bin").exists():
        raise PatchError(
            f"{folder}: holds adapter_model.bin, a pickle, which can run code when it is opened. Load it with PEFT"
            " where you trust it and call save_pretrained(), which writes safetensors"
        )
    _check_digest(folder, path)
    file = open_tensors(path)
    found: dict[str, dict[str, Tensor]] = {}
    for key in file.entries:
        module, name = _parse_key(path, key)
        found.setdefault(module, {})[name] = file.read(key)
    if not found:
        raise PatchError(f"{path}: holds no tensors; the adapter was lost when it was saved")
    layers = {module: _layer(path, config, module, tensors) for module, tensors in found.items()}
    return Patch(folder, config, layers, _facts(path, file.metadata))


def write_patch(
    folder: Path, model: nn.Module, tensors: Mapping[str, Tensor], *,
    facts: Mapping[str, Any], base_model: str | None, revision: str | None, card: str,
) -> None:  # fmt: skip
    """Write the adapter of ``model`` as a patch, durably; ``tensors`` are its whole tensors, in float32.

    The same adapter and facts give the same bytes. What is written is read back and compared.
    """
    layers = dict(adapted_layers(model))
    _check_complete(layers, tensors)
    first = next(iter(layers.values()))
    content = BytesIO()
    write_tensors(
        content,
        {f"{PREFIX}{name}.weight": tensors[name] for name in sorted(tensors)},
        {"format": "pt", "lorakit": json.dumps(facts, sort_keys=True)},
    )
    config = config_json(
        {name: (layer.rank, layer.alpha) for name, layer in layers.items()},
        [name for name, _ in model.named_modules()],
        method=first.method, dropout=first.dropout.p, base_model=base_model, revision=revision,
        task_type="CAUSAL_LM" if type(model).__name__.endswith("ForCausalLM") else None,
        fan_in_fan_out=all(layer.kind.transposed for layer in layers.values()),
    )  # fmt: skip
    _check_config(parse_config(folder / CONFIG_FILE, config), layers)
    folder.mkdir(parents=True, exist_ok=True)
    digests = {TENSOR_FILE: hashlib.sha256(content.getvalue()).hexdigest()}
    files: dict[str, bytes | str] = {
        TENSOR_FILE: content.getvalue(), SIDECAR: json_text({"format": 1, "files": digests}), "README.md": card,
        CONFIG_FILE: json_text(config),
    }  # fmt: skip
    write_files(folder, files, last=CONFIG_FILE)
    _check_written(folder, tensors)


def remove_patch(folder: Path) -> None:
    """Take back a patch; the commit point goes first."""
    for name in (CONFIG_FILE, TENSOR_FILE, SIDECAR):
        (folder / name).unlink(missing_ok=True)
        sync_folder(folder)


def check_fits(patch: Patch, targets: Mapping[str, tuple[Kind, tuple[int, int]]], base: object) -> None:
    """Passes when every layer of the patch is a layer of the base, of the same sizes.

    ``targets``: module -> (kind, (out, in)) for every layer of the base that can be adapted.

    Raises:
        PatchError: names every layer that is missing or differs.
    """
    problems = []
    for name, layer in patch.layers.items():
        sizes = (layer.tensors["lora_B"].shape[0], layer.tensors["lora_A"].shape[1])
        if name not in targets:
            problems.append(f"{name} is not a linear layer of this base.{nearest(name, targets)}")
        elif targets[name][1] != sizes:
            problems.append(f"{name} is {targets[name][1]} (out, in) in the base, {sizes} in the patch")
    if problems:
        more = [f"... and {len(problems) - 3} more"] if len(problems) > 3 else []
        shown = "\n  ".join(
            [*problems[:3], *more, f"it was made for {patch.config.base_model or 'a base without a name'}"]
        )
        raise PatchError(
            f"{patch.folder}: does not fit {base}: {len(problems)} of {len(patch.layers)} layers\n  {shown}"
        )


def _parse_key(path: Path, key: str) -> tuple[str, str]:
    module, _, name = key.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
    if not key.startswith(PREFIX) or not key.endswith(".weight") or name not in ("lora_A", "lora_B") or not module:
        raise PatchError(f"{path}: {key}: a tensor lorakit does not know; it reads <module>.lora_A and .lora_B weights")
    return module, name


def _layer(path: Path, config: PatchConfig, module: str, tensors: dict[str, Tensor]) -> PatchLayer:
    for name in ("lora_A", "lora_B"):
        if name not in tensors:
            raise PatchError(f"{path}: {module}.{name} is missing")
        if tensors[name].ndim != 2 or not tensors[name].is_floating_point():
            raise PatchError(
                f"{path}: {module}.{name}: {tuple(tensors[name].shape)} {tensors[name].dtype}, not a matrix"
            )
        if not torch.isfinite(tensors[name]).all():
            raise PatchError(f"{path}: {module}.{name} holds values that are not finite")
    rank = config.rank_of(module)
    a, b = tensors["lora_A"].shape, tensors["lora_B"].shape
    if a[0] != rank or b[1] != rank:
        raise PatchError(f"{path}: {module}: the config says rank {rank}, but A is {tuple(a)} and B is {tuple(b)}")
    return PatchLayer(config.method, rank, config.alpha_of(module), tensors)


def _facts(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        facts = json.loads(metadata.get("lorakit", "{}"))
        base, data, results = facts.get("base"), facts.get("data", {}), facts.get("results", {})
        right = base is None or (isinstance(base["scheme"], str) and isinstance(base["weights"], dict))
        right = right and all(isinstance(part["sources"], list) for part in data.values())
        right = right and all(isinstance(value, int | float) for value in results.values())
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        right = False
    if not right:
        raise PatchError(f"{path}: lorakit's own facts in the metadata are damaged")
    return dict(facts)


def _check_digest(folder: Path, path: Path) -> None:
    sidecar = folder / SIDECAR
    if not sidecar.is_file() or not path.is_file():
        return
    try:
        told = json.loads(sidecar.read_text())["files"][TENSOR_FILE]
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise PatchError(f"{sidecar}: cannot be read: {problem}") from None
    if digest(path) != told:
        raise PatchError(f"{path}: is not the file that was saved (its SHA-256 differs from {sidecar.name})")


def _check_complete(layers: Mapping[str, LoraLinear], tensors: Mapping[str, Tensor]) -> None:
    if not layers:
        raise PatchError("the model has no adapter: call lorakit.inject first")
    for name, layer in layers.items():
        shapes = {"lora_A": (layer.rank, layer.in_features), "lora_B": (layer.out_features, layer.rank)}
        for key, shape in shapes.items():
            tensor = tensors.get(f"{name}.{key}")
            if tensor is None or tuple(tensor.shape) != shape:
                got = "nothing" if tensor is None else tuple(tensor.shape)
                raise PatchError(f"{name}.{key}: {shape} was trained, {got} arrived to be saved")
            if not torch.isfinite(tensor).all():
                raise PatchError(f"{name}.{key} holds values that are not finite; nothing was saved")


def _check_config(config: PatchConfig, layers: Mapping[str, LoraLinear]) -> None:
    """The settings to be written must give every layer its own method, rank and alpha back."""
    for name, layer in layers.items():
        found = (config.method, config.rank_of(name), config.alpha_of(name))
        if found != (layer.method, layer.rank, layer.alpha):
            raise PatchError(f"{name}: {(layer.method, layer.rank, layer.alpha)} would be read back as {found}")


def _check_written(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    written = read_patch(folder)
    for module, layer in written.layers.items():
        for key, tensor in layer.tensors.items():
            if not torch.equal(tensor, tensors[f"{module}.{key}"].cpu()):
                raise PatchError(f"{folder}: {module}.{key} reads back differently from what was written")
