"""Read a patch folder: checked before anything is allocated, whole, and only what was checked.

``read_patch`` takes it into memory; ``open_patch`` reads a layer when it is asked for.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from lorakit.errors import PatchError, nearest
from lorakit.patch.config import PatchConfig, read_config
from lorakit.patch.names import EMBEDDING_PARTS, LINEAR_PARTS, CopyName, UpdateName, WholeName, parse_key, whole_key
from lorakit.patch.patch import DEFAULT_CAPS, FLOATS, SIDECAR, TENSOR_FILE, Caps, Patch, PatchLayer, is_finite
from lorakit.patch.tensor_file import TensorFile, open_tensors

MAX_SIDECAR_BYTES = 1 << 20


class StoredTensors(Mapping[str, Tensor]):
    """Tensors that are read from their file when they are asked for."""

    def __init__(self, file: TensorFile, keys: Mapping[str, str]) -> None:
        self._file, self.keys_in_file = file, keys

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._file.read(self.keys_in_file[name])
        if not is_finite(tensor):
            raise PatchError(f"{self._file.path}: {self.keys_in_file[name]} holds values that are not finite")
        return tensor

    def elements(self, name: str, start: int, stop: int) -> Tensor:
        """Elements of a flattened tensor; nothing else of it is read."""
        tensor = self._file.read_elements(self.keys_in_file[name], start, stop)
        if not is_finite(tensor):
            raise PatchError(f"{self._file.path}: {self.keys_in_file[name]} holds values that are not finite")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys_in_file)

    def __len__(self) -> int:
        return len(self.keys_in_file)


def open_patch(folder: str | Path, caps: Caps = DEFAULT_CAPS) -> Patch:
    """A patch folder whose tensors are read when they are asked for: a layer at a time fits in any memory.

    Raises:
        PatchError: as ``read_patch``; a tensor that is not finite is noticed when it is read.
    """
    path, config = _located(Path(folder), caps)
    patch = _assemble(Path(folder), config, open_tensors(path, caps.header_bytes, caps.file_bytes), caps)
    with open(path, "rb") as content:
        found = _check_digest(path, iter(lambda: content.read(1 << 24), b""))
    return replace(patch, digest=found)


def read_patch(folder: str | Path, caps: Caps = DEFAULT_CAPS) -> Patch:
    """A patch folder written by lorakit or PEFT, read into memory; all of it or nothing.

    What its header and config tell is checked before anything is allocated. Then the file is read once, so that the
    bytes that were checked are those that are used.

    Raises:
        PatchError: cut, altered, foreign, larger than ``caps``, or with a missing, extra, mis-shaped or non-finite
        tensor.
    """
    path, config = _located(Path(folder), caps)
    stored = open_tensors(path, caps.header_bytes, caps.file_bytes)
    patch = _assemble(Path(folder), config, stored, caps)
    file = stored.loaded()
    assert file.content is not None
    found = _check_digest(path, [file.content])

    def taken(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert isinstance(tensors, StoredTensors)
        return dict(StoredTensors(file, tensors.keys_in_file))

    layers = {name: replace(layer, tensors=taken(layer.tensors)) for name, layer in patch.layers.items()}
    return replace(patch, layers=layers, whole=taken(patch.whole), copies=taken(patch.copies), digest=found)


def _located(folder: Path, caps: Caps) -> tuple[Path, PatchConfig]:
    config = read_config(folder, caps.header_bytes)
    path = folder / TENSOR_FILE
    if not path.exists() and (folder / "adapter_model.bin").exists():
        raise PatchError(
            f"{folder}: holds adapter_model.bin, a pickle, which can run code when it is opened. Where you trust it:\n"
            '  python -c "import torch; from safetensors.torch import save_file;'
            f" t = torch.load({str(folder / 'adapter_model.bin')!r}, weights_only=True, map_location='cpu');"
            f' save_file({{k: v.contiguous().clone() for k, v in t.items()}}, {str(path)!r})"'
        )
    return path, config


def _assemble(folder: Path, config: PatchConfig, file: TensorFile, caps: Caps) -> Patch:
    """The patch that a checked header describes; no tensor is read."""
    updates: dict[tuple[str, bool], dict[str, str]] = {}
    whole: dict[str, str] = {}
    copies: dict[str, CopyName] = {}
    for key, entry in file.entries.items():
        name = parse_key(key)
        if entry.dtype not in FLOATS:
            raise PatchError(f"{file.path}: {key}: {entry.dtype}; the tensors of a patch are 16, 32 or 64 bit floats")
        if isinstance(name, UpdateName):
            updates.setdefault((name.module, name.embedding), {})[name.part] = key
        elif isinstance(name, WholeName):
            whole[name.parameter] = key
        elif isinstance(name, CopyName):
            copies[key] = name
        else:
            raise PatchError(_unknown(file.path, key))
    if not updates and not whole:
        raise PatchError(f"{file.path}: holds no tensors; the adapter was lost when it was saved")
    if len({module for module, _ in updates}) < len(updates):
        raise PatchError(f"{file.path}: a layer has both lora_A and lora_embedding_A")
    layers = {
        module: _layer(file, config, module, keys, embedding, caps) for (module, embedding), keys in updates.items()
    }
    _check_whole(file.path, whole, layers)
    _check_copies(file, copies, whole)
    shapes = {parameter: file.entries[key].shape for parameter, key in whole.items()}
    kept = StoredTensors(file, {key: key for key in copies})
    facts = _facts(file.path, file.metadata)
    return Patch(folder, config, layers, StoredTensors(file, whole), shapes, kept, facts)


def _unknown(path: Path, key: str) -> str:
    suffixes = [*LINEAR_PARTS, *EMBEDDING_PARTS]
    end = ".".join(key.rsplit(".", 2)[-2:])
    return (
        f"{path}: {key}: a tensor lorakit does not know; it reads base_model.model.<module>.{{{', '.join(suffixes)}}}"
        f" and whole tensors base_model.model.<parameter>.{nearest(end, suffixes)}"
    )


def _layer(
    file: TensorFile, config: PatchConfig, module: str, keys: Mapping[str, str], embedding: bool, caps: Caps
) -> PatchLayer:
    path, entries = file.path, {part: file.entries[key] for part, key in keys.items()}
    for part in ("lora_A", "lora_B"):
        if part not in entries:
            raise PatchError(f"{path}: {module}.{part} is missing")
        if len(entries[part].shape) != 2:
            raise PatchError(f"{path}: {module}.{part}: {entries[part].shape}, not a matrix")
    rank, alpha = config.rank_of(module), config.alpha_of(module)
    a, b = entries["lora_A"].shape, entries["lora_B"].shape
    if a[0] != rank or b[1] != rank:
        raise PatchError(f"{path}: {module}: the config says rank {rank}, but A is {a} and B is {b}")
    if rank > caps.rank:
        raise PatchError(f"{path}: {module}: rank {rank}, {caps.rank} is allowed (Caps.rank)")
    return PatchLayer(config.method, rank, alpha, (b[0], a[1]), StoredTensors(file, keys), embedding)


def _check_whole(path: Path, whole: Mapping[str, str], layers: Mapping[str, Any]) -> None:
    """Every whole tensor stands where PEFT looks for it."""
    for parameter, key in whole.items():
        if key != (expected := whole_key(parameter, layers)):
            raise PatchError(f"{path}: {key}: PEFT would not read it; expected the name {expected}")


def _check_copies(file: TensorFile, copies: Mapping[str, CopyName], whole: Mapping[str, str]) -> None:
    for key, name in copies.items():
        if name.parameter not in whole:
            raise PatchError(f"{file.path}: {key}: the file has no {name.parameter} that it would be a copy of")
        if not name.original and not torch.equal(file.read(key), file.read(whole[name.parameter])):
            raise PatchError(f"{file.path}: {key} and {whole[name.parameter]} hold different values for one tensor")


def _facts(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        facts = json.loads(metadata.get("lorakit", "{}"))
        base, data, results = facts.get("base"), facts.get("data", {}), facts.get("results", {})
        right = base is None or (isinstance(base["scheme"], str) and isinstance(base["weights"], dict))
        right = right and (base is None or isinstance(base.get("rounded_to"), str | None))
        right = right and isinstance(facts.get("adapter", {}), dict)
        right = right and all(isinstance(name, str) for part in data.values() for name in part["sources"])
        right = right and all(isinstance(value, int | float) for value in results.values())
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        right = False
    if not right:
        raise PatchError(f"{path}: lorakit's own facts in the metadata are damaged")
    return dict(facts)


def _check_digest(path: Path, content: Iterable[bytes | memoryview]) -> str:
    """The XXH3-128 of a tensor file, once it is seen to be what the sidecar tells; others write no sidecar."""
    sidecar, told = path.parent / SIDECAR, {}
    if sidecar.is_file():
        try:
            with open(sidecar, "rb") as file:
                known = json.loads(file.read(MAX_SIDECAR_BYTES))
            fast = known.get("xxh3_128", {}).get(TENSOR_FILE)
            told = {"xxh3_128": fast} if fast else {"sha256": known["files"][TENSOR_FILE]}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
            raise PatchError(f"{sidecar}: cannot be read: {problem}") from None
    states = {"xxh3_128": xxhash.xxh3_128()} | ({"sha256": hashlib.sha256()} if "sha256" in told else {})
    for block in content:
        for state in states.values():
            state.update(block)
    for name, value in told.items():
        if states[name].hexdigest() != value:
            raise PatchError(f"{path}: is not the file that was saved (its {name} differs from {sidecar.name})")
    return str(states["xxh3_128"].hexdigest())
