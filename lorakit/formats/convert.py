"""Convert an adapter between PEFT's form and mlx-lm's, exactly or not at all, and check that it fits its base."""

from pathlib import Path
from typing import Final

from lorakit.base.find import find_base
from lorakit.base.transformers_io import load_skeleton
from lorakit.errors import PatchError, check_absent
from lorakit.files.text import Say
from lorakit.formats.mlx import TENSOR_FILE as MLX_TENSOR_FILE
from lorakit.formats.mlx import read_mlx, write_mlx
from lorakit.patch import BaseShapes, check_fits, read_patch, write_new_patch
from lorakit.patch.patch import TENSOR_FILE, check_plain

FORMATS: Final = ("peft", "mlx")


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
