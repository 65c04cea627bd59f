"""Write a patch: durably, the same bytes for the same adapter, and read back before it counts."""

import hashlib
import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import xxhash
from torch import Tensor, nn

from lorakit.durable import committed_folder, json_text, sync_folder, write_files
from lorakit.errors import PatchError
from lorakit.lora.inject import adapted_layers
from lorakit.lora.layer import LoraLinear
from lorakit.patch.card import model_card
from lorakit.patch.config import CONFIG_FILE, config_json, parse_config
from lorakit.patch.names import update_key, whole_key
from lorakit.patch.patch import SIDECAR, TENSOR_FILE, Patch, PatchLayer, is_finite
from lorakit.patch.read import read_patch
from lorakit.patch.tensor_file import write_tensors


def write_patch(folder: str | Path, patch: Patch, *, overwrite: bool = False, card: str | None = None) -> Path:
    """Write a patch that is in memory; returns the folder. What PEFT wrote comes out with the same tensors and keys.

    ``card``: the README.md; one is written from the facts when it is not given.

    Raises:
        PatchError: a patch or a README.md of others is there and ``overwrite`` is off, or the settings would not
        give every layer its rank and alpha back. TryAgainLater: the disk is full; what was there is kept.
    """
    folder = Path(folder)
    if not overwrite:
        _check_free(folder)
    _check_settings(folder, patch)
    keys = keyed_tensors(patch)
    metadata = {"format": "pt"} | ({"lorakit": json.dumps(patch.facts, sort_keys=True)} if patch.facts else {})
    written: dict[str, str] = {}

    def tensor_file(file: BinaryIO) -> None:
        hashing = _Hashing(file)
        write_tensors(hashing, keys, metadata)
        written.update(hashing.digests())

    def sidecar(file: BinaryIO) -> None:
        told = {"files": {TENSOR_FILE: written["sha256"]}, "xxh3_128": {TENSOR_FILE: written["xxh3_128"]}}
        file.write(json_text({"format": 1, **told}).encode())

    folder.mkdir(parents=True, exist_ok=True)
    write_files(
        folder,
        {
            TENSOR_FILE: tensor_file, SIDECAR: sidecar,
            "README.md": card or model_card(folder.name, patch.config.base_model, patch.facts),
            CONFIG_FILE: json_text(patch.config.raw),
        },
        last=CONFIG_FILE,
    )  # fmt: skip
    if read_patch(folder).digest != written["xxh3_128"]:
        raise PatchError(f"{folder / TENSOR_FILE}: reads back differently from what was written")
    return folder


def write_new_patch(out: str | Path, patch: Patch, beside: Collection[Path] = ()) -> Path:
    """Write a patch into a folder that appears when it is whole; returns it. ``beside``: files copied into it.

    Raises:
        FileExistsError: ``out`` is there. TryAgainLater: the disk is full; nothing is left.
    """
    out = Path(out)
    with committed_folder(out) as staging:
        for path in beside:
            shutil.copyfile(path, staging / path.name)
        write_patch(staging, patch, card=model_card(out.name, patch.config.base_model, patch.facts))
    return out


def keyed_tensors(patch: Patch) -> dict[str, Tensor]:
    """The tensors of a patch by their keys in the file, sorted."""
    keys = {
        update_key(module, part, embedding=layer.embedding): tensor
        for module, layer in patch.layers.items()
        for part, tensor in layer.tensors.items()
    }
    keys |= patch.copies
    keys |= {whole_key(parameter, patch.layers): tensor for parameter, tensor in patch.whole.items()}
    return dict(sorted(keys.items()))


def new_patch(
    layers: Mapping[str, PatchLayer],
    *,
    facts: Mapping[str, Any],
    base_model: str | None,
    whole: Mapping[str, Tensor] | None = None,
    **settings: Any,
) -> Patch:
    """A patch in memory from updates of one method; ``settings`` as ``config_json`` takes them.

    Raises:
        PatchError: nothing to hold, or a tensor that is not finite; nothing is saved.
    """
    whole = dict(whole or {})
    if not layers:
        raise PatchError("a patch without updates: there is nothing to save")
    for name, tensor in [*((f"{m}.{p}", t) for m, layer in layers.items() for p, t in layer.tensors.items()),
                         *whole.items()]:  # fmt: skip
        if not is_finite(tensor):
            raise PatchError(f"{name} holds values that are not finite; nothing was saved")
    method = next(iter(layers.values())).method
    raw = config_json(
        {name: (layer.rank, layer.alpha) for name, layer in layers.items()}, method=method, base_model=base_model,
        **settings,
    )  # fmt: skip
    raw |= _declared(whole, layers)
    config = parse_config(Path(CONFIG_FILE), raw)
    shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}
    return Patch(Path(), config, layers, whole, shapes, facts=facts)


def _declared(whole: Collection[str], layers: Collection[str]) -> dict[str, Any]:
    """The settings that tell PEFT of whole tensors: biases by themselves, any other with its module."""
    modules = {name.rpartition(".")[0] for name in whole if not name.endswith(".bias")}
    biased = {name.rpartition(".")[0] for name in whole if name.endswith(".bias")} - modules
    bias = "none" if not biased else "lora_only" if biased <= set(layers) else "all"
    return {"bias": bias} | ({"modules_to_save": sorted(modules)} if modules else {})


def adapter_patch(
    model: nn.Module, tensors: Mapping[str, Tensor], *, facts: Mapping[str, Any], base_model: str | None,
    revision: str | None = None,
) -> Patch:  # fmt: skip
    """The adapter of ``model`` as a patch; ``tensors`` are its whole tensors by name, in float32.

    Raises:
        PatchError: the model has no adapter, or a tensor is missing, mis-shaped or not finite.
    """
    adapted = dict(adapted_layers(model))
    if not adapted:
        raise PatchError("the model has no adapter: call lorakit.inject first")
    first = next(iter(adapted.values()))
    return new_patch(
        {name: _layer(name, layer, tensors) for name, layer in adapted.items()},
        facts=facts, base_model=base_model, revision=revision, dropout=first.dropout.p,
        all_modules=[name for name, _ in model.named_modules()],
        task_type="CAUSAL_LM" if type(model).__name__.endswith("ForCausalLM") else None,
        fan_in_fan_out=all(layer.kind.transposed for layer in adapted.values()),
    )  # fmt: skip


def remove_patch(folder: Path) -> None:
    """Take back a patch; the commit point goes first."""
    for name in (CONFIG_FILE, TENSOR_FILE, SIDECAR):
        (folder / name).unlink(missing_ok=True)
        sync_folder(folder)


class _Hashing:
    """A file that knows the digests of what was written into it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._sha256, self._xxh3 = file, hashlib.sha256(), xxhash.xxh3_128()

    def write(self, content: bytes | memoryview) -> int:
        self._sha256.update(content)
        self._xxh3.update(content)
        return self._file.write(content)

    def digests(self) -> dict[str, str]:
        return {"sha256": self._sha256.hexdigest(), "xxh3_128": self._xxh3.hexdigest()}


def _layer(name: str, layer: LoraLinear, tensors: Mapping[str, Tensor]) -> PatchLayer:
    sizes = (layer.out_features, layer.in_features)
    own = {}
    for part, shape in {"lora_A": (layer.rank, sizes[1]), "lora_B": (sizes[0], layer.rank)}.items():
        tensor = tensors.get(f"{name}.{part}")
        if tensor is None or tuple(tensor.shape) != shape:
            got = "nothing" if tensor is None else tuple(tensor.shape)
            raise PatchError(f"{name}.{part}: {shape} was trained, {got} arrived to be saved")
        own[part] = tensor
    return PatchLayer(layer.method, layer.rank, layer.alpha, sizes, own)


def _check_free(folder: Path) -> None:
    if (folder / CONFIG_FILE).exists():
        raise PatchError(f"{folder}: holds a patch already; choose another folder or pass overwrite=True")
    if (folder / "README.md").exists():
        raise PatchError(f"{folder}: holds a README.md that would be replaced by the model card; choose another folder")


def _check_settings(folder: Path, patch: Patch) -> None:
    """The settings to be written must give every layer its own method, rank and alpha back."""
    config = parse_config(folder / CONFIG_FILE, json.loads(json_text(patch.config.raw)))
    for name, layer in patch.layers.items():
        found = (config.method, config.rank_of(name), config.alpha_of(name))
        if found != (layer.method, layer.rank, layer.alpha):
            raise PatchError(f"{name}: {(layer.method, layer.rank, layer.alpha)} would be read back as {found}")
