"""Store a patch's settings and facts in the header of a foreign file, and restore them when it is converted back.

Other programs ignore this metadata. It is used only if the digest of the tensors still matches.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from lorakit.errors import PatchError
from lorakit.files.safetensors import SafetensorsFile, tensor_bytes
from lorakit.patch import Patch
from lorakit.patch.adapter_config import parse_config
from lorakit.version import VERSION

FACTS: Final = "lorakit"
"""key in the header's metadata"""


@dataclass(frozen=True)
class ConversionSource:
    """The file that a patch was converted from."""

    format: str
    sha256: str
    """digest of the tensor file"""
    prefix: str | None = None
    """requested prefix; tensors with other prefixes were left out. None: no prefix was requested"""

    def facts(self) -> dict[str, Any]:
        """Return the source as it is stored in a patch and in a foreign file."""
        prefix = {} if self.prefix is None else {"prefix": self.prefix}
        return {"lorakit": VERSION, "converted": {"from": self.format, "source_sha256": self.sha256, **prefix}}


@dataclass(frozen=True)
class OriginalMetadata:
    """The settings and facts of the patch that a foreign file was written from."""

    path: Path
    config: Mapping[str, Any]
    facts: Mapping[str, Any]
    embeddings: tuple[str, ...]
    lora_alpha: float | None
    """alpha of loralib's layers; None in formats that store it themselves"""

    def restore(self, patch: Patch) -> Patch:
        """Return the patch with its old settings and facts; unchanged if these give a layer another scale or rank."""
        config = parse_config(self.path, self.config)
        layers = {
            name: replace(layer, method=config.method, alpha=config.alpha_of(name))
            for name, layer in patch.layers.items()
        }
        same = all(
            config.rank_of(name) == layer.rank and layers[name].scale == layer.scale
            for name, layer in patch.layers.items()
        )
        return (
            replace(patch, config=config, layers=layers, metadata={**self.facts, **patch.metadata}) if same else patch
        )


def metadata_of(patch: Patch, origin: ConversionSource, *, lora_alpha: float | None = None) -> dict[str, str]:
    """Return the metadata of a foreign file's header, equal for equal patches."""
    tensors = {f"{name}.{part}": t for name, layer in patch.layers.items() for part, t in layer.tensors.items()}
    content = {
        **origin.facts(),
        "config": dict(patch.config.raw), "facts": dict(patch.metadata), "lora_alpha": lora_alpha,
        "embeddings": sorted(name for name, layer in patch.layers.items() if layer.embedding),
        "tensors_sha256": _tensors_digest({**tensors, **patch.full_tensors}),
    }  # fmt: skip
    return {"format": "pt", FACTS: json.dumps(content, sort_keys=True)}


def read_original(file: SafetensorsFile, tensors: Mapping[str, Tensor]) -> OriginalMetadata | None:
    """Read the metadata of the original patch; None if there is none, or if the tensors have changed since.

    ``tensors``: ``<module>.lora_A``, ``<module>.lora_B`` and full tensors by parameter, in lorakit's layout.

    Raises:
        PatchError: the metadata is damaged.
    """
    try:
        content = json.loads(file.metadata.get(FACTS, "{}"))
        if "tensors_sha256" not in content or content["tensors_sha256"] != _tensors_digest(tensors):
            return None
        config, facts, embeddings = dict(content["config"]), dict(content["facts"]), tuple(content["embeddings"])
        alpha = content["lora_alpha"]
        return OriginalMetadata(file.path, config, facts, embeddings, None if alpha is None else float(alpha))
    except (ValueError, RecursionError, TypeError, KeyError) as problem:
        raise PatchError(f"{file.path}: lorakit's own facts in the metadata are damaged: {problem!r}") from None


def _tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    state = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        state.update(tensor_bytes(tensor))
    return state.hexdigest()
