"""Read a patch folder: checked before anything is allocated, whole, and only what was checked.

``read_patch`` takes it into memory; ``open_patch`` reads a layer when it is asked for.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import xxhash
from torch import Tensor

from lorakit.errors import PatchError
from lorakit.files.safetensors import open_tensors
from lorakit.patch.adapter_config import PatchConfig, read_config
from lorakit.patch.assemble import build_patch
from lorakit.patch.lazy import LazyTensors
from lorakit.patch.patch import DEFAULT_CAPS, SIDECAR, TENSOR_FILE, Caps, Patch

MAX_SIDECAR_BYTES = 1 << 20
BLOCK_BYTES = 1 << 20


def open_patch(folder: str | Path, caps: Caps = DEFAULT_CAPS) -> Patch:
    """A patch folder whose tensors are read when they are asked for: a layer at a time fits in any memory.

    Raises:
        PatchError: as ``read_patch``; a tensor that is not finite is noticed when it is read.
    """
    path, config = _located(Path(folder), caps)
    patch = build_patch(Path(folder), config, open_tensors(path, caps.header_bytes, caps.file_bytes), caps)
    return replace(patch, digest=_check_digest(path, _blocks(path)))


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
    patch = build_patch(Path(folder), config, stored, caps)
    file = stored.into_memory()
    assert file.content is not None
    found = _check_digest(path, [file.content])

    def taken(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert isinstance(tensors, LazyTensors)
        return dict(LazyTensors(file, tensors.keys_in_file))

    layers = {name: replace(layer, tensors=taken(layer.tensors)) for name, layer in patch.layers.items()}
    return replace(
        patch, layers=layers, full_tensors=taken(patch.full_tensors), copies=taken(patch.copies), digest=found
    )


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


def _blocks(path: Path) -> Iterator[memoryview]:
    """The bytes of a file, in memory that is used again for the next ones."""
    held = memoryview(bytearray(BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(held):
            yield held[:size]


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
