"""What a foreign file says, and the patch it becomes."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from lorakit.errors import PatchError
from lorakit.files.safetensors import SafetensorsFile
from lorakit.formats.factors import FactorPair
from lorakit.formats.metadata import ConversionSource, OriginalMetadata, read_kept
from lorakit.formats.options import Base, Options
from lorakit.lora.layer_kinds import CONV1D
from lorakit.patch import Patch, PatchLayer, new_patch


@dataclass(frozen=True)
class ForeignAdapter:
    """The layers of a foreign file by their names in the base, with the alphas that its own rule gives them."""

    file: SafetensorsFile
    pairs: Mapping[str, FactorPair]
    alphas: Mapping[str, float]
    method: str = "lora"
    dropout: float = 0.0
    biases: Mapping[str, Tensor] = field(default_factory=dict)
    """by parameter name"""

    @cached_property
    def kept(self) -> OriginalMetadata | None:
        tensors = {f"{name}.{part}": t for name, pair in self.pairs.items() for part, t in pair.tensors.items()}
        return read_kept(self.file, {**tensors, **self.biases})

    @property
    def sha256(self) -> str:
        assert self.file.content is not None
        return hashlib.sha256(self.file.content).hexdigest()


def as_patch(found: ForeignAdapter, options: Options, origin: ConversionSource) -> Patch:
    """The patch with these layers; with its old settings and facts where it was one before."""
    base = options.base
    layers = {
        name: PatchLayer(found.method, pair.rank, found.alphas[name], pair.sizes, pair.tensors, pair.embedding)
        for name, pair in found.pairs.items()
    }
    try:
        patch = new_patch(
            layers, facts=origin.facts(), whole=found.biases, dropout=found.dropout,
            fan_in_fan_out=_all_conv1d(base, layers),
            **(_of_base(base) if base else {"base_model": None, "task_type": None}),
        )  # fmt: skip
    except PatchError as problem:
        raise PatchError(f"{found.file.path}: {problem}") from None
    patch = replace(patch, folder=found.file.path)
    return found.kept.restore(patch) if found.kept else patch


def _of_base(base: Base) -> dict[str, Any]:
    return {
        "base_model": base.name, "revision": base.revision, "all_modules": base.modules, "task_type": "CAUSAL_LM",
    }  # fmt: skip


def _all_conv1d(base: Base | None, layers: Mapping[str, PatchLayer]) -> bool:
    known = base.shapes.layers if base else {}
    return all(name in known and known[name][0] is CONV1D for name in layers)
