"""What a foreign file remembers of the patch it came from: settings and facts, in its header's metadata.

Other programs do not look at it. It is believed only while the tensors are the very ones it was written for.
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
"""the key in the metadata"""


@dataclass(frozen=True)
class ConversionSource:
    """Where a patch was converted from."""

    format: str
    sha256: str
    """of the file with the tensors"""
    prefix: str | None = None
    """of the tensors that were asked for; others in the file were left out"""

    def facts(self) -> dict[str, Any]:
        """As a patch and a foreign file remember it."""
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
    """what loralib's layers have to be made with; None in formats that hold it themselves"""

    def restore(self, patch: Patch) -> Patch:
        """The patch with its old settings and facts, where they give every layer the scale that the file gives it."""
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
    """The metadata of a foreign file's header, the same for the same patch."""
    tensors = {f"{name}.{part}": t for name, layer in patch.layers.items() for part, t in layer.tensors.items()}
    content = {
        **origin.facts(),
        "config": dict(patch.config.raw), "facts": dict(patch.metadata), "lora_alpha": lora_alpha,
        "embeddings": sorted(name for name, layer in patch.layers.items() if layer.embedding),
        "tensors_sha256": _tensors_digest({**tensors, **patch.full_tensors}),
    }  # fmt: skip
    return {"format": "pt", FACTS: json.dumps(content, sort_keys=True)}


def read_kept(file: SafetensorsFile, tensors: Mapping[str, Tensor]) -> OriginalMetadata | None:
    """What the file remembers, or None: nothing, or it is about other tensors.

    ``tensors``: ``<module>.lora_A``, ``<module>.lora_B`` and whole parameters, in lorakit's layout.

    Raises:
        PatchError: it is damaged.
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
