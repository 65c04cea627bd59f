"""Convert an adapter: read any format into a patch, check that the patch fits its base, write the requested format.

The conversion is exact, or it is refused and nothing is written.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lorakit.errors import PatchError, did_you_mean
from lorakit.files.atomic import digest
from lorakit.files.safetensors import SafetensorsFile
from lorakit.formats.adapter import ForeignAdapter, Options, as_patch, open_base
from lorakit.formats.detect import detect_format
from lorakit.formats.diffusers import read_diffusers, write_diffusers
from lorakit.formats.kohya import read_kohya, write_kohya
from lorakit.formats.loralib import read_loralib, write_loralib
from lorakit.formats.metadata import ConversionSource
from lorakit.formats.mlx import read_mlx, write_mlx
from lorakit.patch import Patch, check_fits, read_patch, write_new_patch
from lorakit.patch.patch import TENSOR_FILE, check_plain


@dataclass(frozen=True)
class Format:
    """The reader and writer of one program's adapters."""

    read: Callable[[SafetensorsFile, Options], ForeignAdapter] | None
    """None: lorakit's own reader of patches"""
    write: Callable[[Path, Patch, Options, ConversionSource], str]
    """returns a note on how to use the result, or an empty text"""
    folder: bool
    """whether an adapter is a folder, not a single file"""
    prefixed: bool = False
    """whether the names of modules may have a prefix"""


def write_peft(out: Path, patch: Patch, options: Options, origin: ConversionSource) -> str:
    """Write a patch folder, as PEFT and lorakit read it.

    Raises:
        TemporaryFailure: the disk is full; nothing is left.
    """
    write_new_patch(out, patch)
    return ""


FORMATS: Final[Mapping[str, Format]] = {
    "peft": Format(None, write_peft, folder=True),
    "kohya": Format(read_kohya, write_kohya, folder=False, prefixed=True),
    "diffusers": Format(read_diffusers, write_diffusers, folder=False, prefixed=True),
    "loralib": Format(read_loralib, write_loralib, folder=False),
    "mlx": Format(read_mlx, write_mlx, folder=True),
}


def convert(
    source: str | Path,
    out: str | Path,
    *,
    to: str = "peft",
    base: str | Path | None = None,
    alpha: float | None = None,
    prefix: str | None = None,
    revision: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write the adapter at ``source`` in another program's format; returns ``out``.

    Every value keeps its bits and every layer its scale, or nothing is written. The format of ``source`` (a folder or
    a .safetensors file) is recognised by its names; ``to`` is one of FORMATS. ``out`` is a folder for peft and mlx, a
    .safetensors file for the others, and must not exist.

    ``base``: a folder, a hub id (with ``revision``) or builtin:tiny. The result is checked against it, and kohya's
    names cannot be read without it. ``alpha``: for a loralib file, which does not store it. ``prefix``: of the names in
    kohya's (``lora_te``) or diffusers' (``text_encoder``) files; of the source if both have one. Tensors with other
    prefixes are left out. ``say``: called with a summary and a note on how to use the result.

    Raises:
        PatchError: the source is damaged or unknown, or ``to`` cannot store it exactly; names the file, the tensor or
        setting, and what to do. BaseModelError: there is no such base. TemporaryFailure: the disk is full. Nothing is
        left of a refused conversion.
    """
    source, out = Path(source), Path(out)
    if to not in FORMATS:
        raise PatchError(f"to: {to!r} is none of {', '.join(FORMATS)}.{did_you_mean(to, FORMATS)}")
    _check_out(out, to)
    name, file = detect_format(source)
    _check_options(name, to, alpha, prefix)
    options = Options(open_base(None if base is None else str(base), revision), alpha, prefix)
    patch, origin, rest = _read(source, name, file, options)
    if options.base is not None:
        check_fits(patch, options.base.shapes, options.base.name)
    if not patch.layers:
        raise PatchError(f"{source}: holds no updates of layers; there is nothing to convert")
    if to != "peft":
        check_plain(patch, f"converting to {to}")
    note = FORMATS[to].write(out, patch, rest, origin)
    say(f"{out}: {len(patch.layers)} layers, from {name} to {to}" + (f"; {note}" if note else ""))
    return out


def _read(
    source: Path, name: str, file: SafetensorsFile | None, options: Options
) -> tuple[Patch, ConversionSource, Options]:
    """Return (the patch, its source, the options that the reader left unused)."""
    read = FORMATS[name].read
    if read is None or file is None:
        return read_patch(source), ConversionSource(name, digest(source / TENSOR_FILE)), options
    adapter = read(file, options)
    used = options.prefix if FORMATS[name].prefixed else None
    origin = ConversionSource(name, adapter.sha256, used)
    rest = Options(options.base, None, options.prefix if used is None else None)
    return as_patch(adapter, options, origin), origin, rest


def _check_out(out: Path, to: str) -> None:
    if os.path.lexists(out):
        raise PatchError(f"out: {out} exists already; choose another name, or remove it")
    if FORMATS[to].folder == (out.suffix == ".safetensors"):
        kind = "a folder" if FORMATS[to].folder else "one file; let its name end in .safetensors"
        raise PatchError(f"out: {out}: an adapter of {to} is {kind}")


def _check_options(name: str, to: str, alpha: float | None, prefix: str | None) -> None:
    """Check that every given argument is used.

    Raises:
        PatchError: an argument would be ignored, or source and target have the same format.
    """
    if name == to:
        raise PatchError(f"to: this is a {name} adapter already; nothing would change")
    if alpha is not None and name != "loralib":
        raise PatchError(f"alpha: {name} adapters hold their own; leave it out")
    if alpha is not None and not 0 < alpha < 1e9:
        raise PatchError(f"alpha: must be a positive number, got {alpha!r}")
    if prefix is not None and not (FORMATS[name].prefixed or FORMATS[to].prefixed):
        raise PatchError(f"prefix: neither {name} nor {to} adapters have one; leave it out")
