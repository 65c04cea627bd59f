"""Detect the program that wrote an adapter, by the names of files and tensors.

A mixture of formats or an unknown name is an error, never a guess.
"""

import json
import shlex
from pathlib import Path
from typing import Final

from lorakit.errors import PatchError
from lorakit.files.safetensors import SafetensorsFile, open_tensors
from lorakit.formats import diffusers, kohya, loralib, mlx
from lorakit.formats.factors import FACTORS, Suffixes, unknown_key_error, variant
from lorakit.patch import Caps
from lorakit.patch.adapter_config import CONFIG_FILE
from lorakit.patch.patch import TENSOR_FILE
from lorakit.patch.peft_names import PREFIX

PICKLES: Final = (".bin", ".ckpt", ".pkl", ".pt", ".pth")
TABLES: Final[dict[str, Suffixes]] = {
    "diffusers": diffusers.SUFFIXES, "kohya": kohya.SUFFIXES, "loralib": loralib.SUFFIXES, "mlx": mlx.SUFFIXES,
}  # fmt: skip


def detect_format(source: Path) -> tuple[str, SafetensorsFile | None]:
    """Return (format of ``source``, its tensor file in memory). The file is None for a patch, read by ``read_patch``.

    Raises:
        PatchError: ``source`` is missing, a pickle, no adapter, or a mixture of formats.
    """
    caps = Caps()
    path = _single(source) if source.is_dir() else source
    if path is None:
        return "peft", None
    _refuse_pickle(path)
    file = open_tensors(path, caps.header_bytes, caps.file_bytes).into_memory()
    if source.is_dir() and path.name == mlx.TENSOR_FILE:
        return "mlx", file
    return _by_keys(file), file


def _single(folder: Path) -> Path | None:
    """Return the tensor file of a folder; None if the folder is a patch.

    Raises:
        PatchError: no tensor file, or several.
    """
    ours = [name for name in (TENSOR_FILE, "adapter_model.bin") if (folder / name).exists()]
    if (folder / mlx.TENSOR_FILE).exists():
        if ours:
            raise PatchError(
                f"{folder}: holds {ours[0]} of PEFT and {mlx.TENSOR_FILE} of mlx-lm; name a folder with one"
            )
        return folder / mlx.TENSOR_FILE
    if ours or (folder / CONFIG_FILE).exists():
        return None
    files = sorted(folder.glob("*.safetensors")) or [
        path for path in sorted(folder.iterdir()) if path.suffix in PICKLES
    ]
    if len(files) != 1:
        names = ", ".join(path.name for path in files) or "no safetensors file"
        raise PatchError(f"{folder}: not an adapter: {names}; name the file that is meant")
    return files[0]


def _refuse_pickle(path: Path) -> None:
    if path.suffix in PICKLES:
        old, new = json.dumps(path.name), json.dumps(path.with_suffix(".safetensors").name)
        code = (
            f"import torch; from safetensors.torch import save_file; t = torch.load({old}, weights_only=True,"
            f' map_location="cpu"); save_file({{k: v.contiguous().clone() for k, v in t.items()}}, {new})'
        )
        raise PatchError(
            f"{path}: a pickle, which can run code when it is opened. Where you trust it, in its folder:\n"
            f"  python -c {shlex.quote(code)}"
        )


def _by_keys(file: SafetensorsFile) -> str:
    examples: dict[str, str] = {}
    for key in file.entries:
        if (name := _format_of(key)) is not None:
            examples.setdefault(name, key)
    if not examples:
        if not file.entries:
            raise PatchError(f"{file.path}: holds no tensors")
        key = next((key for key in file.entries if variant(key)), next(iter(file.entries)))
        raise unknown_key_error(
            file, key, {suffix: part for table in TABLES.values() for suffix, part in table.items()}
        )
    if len(examples) > 1:
        mixture = ", ".join(f"{key} is of {name}" for name, key in examples.items())
        raise PatchError(f"{file.path}: a mixture of formats: {mixture}; save each adapter in a file of its own")
    name = next(iter(examples))
    if name in ("peft", "mlx"):
        raise PatchError(f"{file.path}: an adapter of {name} is a folder with {CONFIG_FILE} in it; name the folder")
    return name


def _format_of(key: str) -> str | None:
    """Return the format that a key belongs to; None if no format is recognised by such keys."""
    if key.startswith(PREFIX):
        return "peft"
    for name, suffixes in TABLES.items():
        for suffix, part in suffixes.items():
            if part in FACTORS and key.endswith(suffix):
                flat = suffix in kohya.SUFFIXES and kohya.is_kohya_name(key.removesuffix(suffix))
                return "kohya" if flat else name
    return None
