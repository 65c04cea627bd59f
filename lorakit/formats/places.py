"""What a target format has no place for is refused by name, before anything is written."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from lorakit.errors import PatchError
from lorakit.files.atomic import write_files
from lorakit.files.safetensors import write_tensors
from lorakit.patch import Patch


def refuse_full_tensors(patch: Patch, to: str, *, but: str | None = None) -> None:
    """Passes when the patch holds no whole tensors, or only such whose names end in ``but``.

    Raises:
        PatchError: names the first.
    """
    for parameter in patch.whole_shapes:
        if but is None or not parameter.endswith(but):
            raise PatchError(
                f"{patch.folder}: {parameter} is a whole tensor of the base, and {to} has no place for it;"
                " merge the patch into its base instead (lorakit merge)"
            )


def refuse_embeddings(patch: Patch, to: str) -> None:
    """Passes when the patch adapts no embedding.

    Raises:
        PatchError: names the first.
    """
    for name, layer in patch.layers.items():
        if layer.embedding:
            raise PatchError(
                f"{patch.folder}: {name} is an embedding, and {to} has no place for its update;"
                " merge the patch into its base instead (lorakit merge)"
            )


def write_single(out: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """One safetensors file, its tensors sorted by name: whole under its name, or not there.

    Raises:
        TemporaryFailure: the disk is full; nothing is left.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    ordered = dict(sorted(tensors.items()))
    write_files(out.parent, {out.name: lambda file: write_tensors(file, ordered, metadata)}, last=out.name)
