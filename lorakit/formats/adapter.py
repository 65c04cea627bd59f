"""Convert a foreign file's layers to a patch, and refuse tensors that a foreign format cannot store.

Every format reads into a ``ForeignAdapter`` and writes from a ``Patch``, with the same ``Options``.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from lorakit.base.find import find_base
from lorakit.base.load import load_skeleton
from lorakit.errors import PatchError
from lorakit.files.atomic import write_files
from lorakit.files.safetensors import SafetensorsFile, write_tensors
from lorakit.formats.factors import FactorPair
from lorakit.formats.metadata import ConversionSource, OriginalMetadata, read_original
from lorakit.lora.layer_kinds import CONV1D
from lorakit.patch import BaseShapes, Patch, PatchLayer, new_patch


@dataclass(frozen=True)
class Base:
    """The names and shapes of a base; no weights are loaded."""

    name: str
    revision: str | None
    shapes: BaseShapes
    modules: tuple[str, ...]
    """names of all modules, adaptable or not"""


@dataclass(frozen=True)
class Options:
    """The arguments of ``convert`` that readers and writers use."""

    base: Base | None = None
    alpha: float | None = None
    """for a file that does not store its alpha"""
    prefix: str | None = None
    """before every name in the file; None: derived from the file"""


@dataclass(frozen=True)
class ForeignAdapter:
    """The contents of a foreign file, by the names of modules in the base."""

    file: SafetensorsFile
    pairs: Mapping[str, FactorPair]
    alphas: Mapping[str, float]
    method: str = "lora"
    dropout: float = 0.0
    biases: Mapping[str, Tensor] = field(default_factory=dict)
    """by parameter name"""

    @cached_property
    def original(self) -> OriginalMetadata | None:
        """Metadata of the patch that the file was converted from; None if there was none or the tensors changed."""
        tensors = {f"{name}.{part}": t for name, pair in self.pairs.items() for part, t in pair.tensors.items()}
        return read_original(self.file, {**tensors, **self.biases})

    @property
    def sha256(self) -> str:
        assert self.file.content is not None
        return hashlib.sha256(self.file.content).hexdigest()


def open_base(name: str | None, revision: str | None) -> Base | None:
    """Open the named base without its weights; None if ``name`` is None.

    Raises:
        BaseModelError: there is no such base. PatchError: a revision without a base.
    """
    if name is None:
        if revision is not None:
            raise PatchError(f"revision: {revision!r} of no base; name the base too (--base, in Python base=)")
        return None
    skeleton = load_skeleton(find_base(name, revision))
    modules = tuple(module for module, _ in skeleton.named_modules())
    return Base(name, revision, BaseShapes.of(skeleton), modules)


def as_patch(adapter: ForeignAdapter, options: Options, origin: ConversionSource) -> Patch:
    """Build a patch from a foreign file; settings and facts of the patch it was converted from are restored.

    Raises:
        PatchError: the layers do not make a valid patch.
    """
    base = options.base
    layers = {
        name: PatchLayer(adapter.method, pair.rank, adapter.alphas[name], pair.sizes, pair.tensors, pair.embedding)
        for name, pair in adapter.pairs.items()
    }
    try:
        patch = new_patch(
            layers, metadata=origin.facts(), full_tensors=adapter.biases, dropout=adapter.dropout,
            fan_in_fan_out=_all_conv1d(base, layers),
            **(_base_settings(base) if base else {"base_model": None, "task_type": None}),
        )  # fmt: skip
    except PatchError as problem:
        raise PatchError(f"{adapter.file.path}: {problem}") from None
    patch = replace(patch, folder=adapter.file.path)
    return adapter.original.restore(patch) if adapter.original else patch


def refuse_full_tensors(patch: Patch, to: str, *, but: str | None = None) -> None:
    """Check that the patch holds no full tensors, except parameters whose names end in ``but``.

    Raises:
        PatchError: names the first full tensor.
    """
    for parameter in patch.full_shapes:
        if but is None or not parameter.endswith(but):
            raise PatchError(
                f"{patch.folder}: {parameter} is a full tensor of the base, and {to} has no place for it;"
                " merge the patch into its base instead (lorakit merge)"
            )


def refuse_embeddings(patch: Patch, to: str) -> None:
    """Check that the patch adapts no embedding.

    Raises:
        PatchError: names the first embedding.
    """
    for name, layer in patch.layers.items():
        if layer.embedding:
            raise PatchError(
                f"{patch.folder}: {name} is an embedding, and {to} has no place for its update;"
                " merge the patch into its base instead (lorakit merge)"
            )


def write_single(out: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write one safetensors file with its tensors sorted by name; it appears when it is complete.

    Raises:
        TemporaryFailure: the disk is full; nothing is left.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    ordered = dict(sorted(tensors.items()))
    write_files(out.parent, {out.name: lambda file: write_tensors(file, ordered, metadata)}, last=out.name)


def _base_settings(base: Base) -> dict[str, Any]:
    return {
        "base_model": base.name, "revision": base.revision, "all_modules": base.modules, "task_type": "CAUSAL_LM",
    }  # fmt: skip


def _all_conv1d(base: Base | None, layers: Mapping[str, PatchLayer]) -> bool:
    known = base.shapes.layers if base else {}
    return all(name in known and known[name][0] is CONV1D for name in layers)
