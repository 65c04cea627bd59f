"""Shapes of every tensor of a base with its adapter, from the model on the meta device.

Of weight files only the headers are read, so a base with missing or truncated weights can be planned for.
"""

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from lorakit.base.layers import gather_groups, layer_lists
from lorakit.base.quantized import quantized_weight
from lorakit.errors import BaseModelError
from lorakit.files.base_files import open_base_files, read_json
from lorakit.files.safetensors import parse_dtype
from lorakit.lora.inject import checkpoint_tensors
from lorakit.planning.skeleton import quantizing_bytes

ROOT: Final = "root"  # The gather group of all tensors outside the repeated layers and an untied embedding.
EMBEDDING: Final = "embedding"
HEAD: Final = "head"
"""Uses of a tensor, besides the index of the layer that has it. EMBEDDING is an untied embedding's gather group too."""


@dataclass(frozen=True)
class ModelShapes:
    """The tensors of a base with its adapter, on meta, by name. A tied tensor counts once."""

    tensors: Mapping[str, Tensor]
    in_checkpoint: Set[Tensor]  # the trainable tensors, and the adapter's fixed tensors
    groups: Mapping[Tensor, str]
    """tensor -> the tensors that a sharding engine gathers together: a layer's name or EMBEDDING; others are in ROOT"""
    uses: Mapping[Tensor, Set[int | str]]
    """tensor -> layers by index, EMBEDDING or HEAD that compute with it; none of a model that is not one list"""
    hidden_size: int
    num_layers: int
    quantization: str = ""  # Name of the quantisation scheme; empty for a base in floats.
    quantizing_bytes: int = 0
    """Most bytes allocated while one weight is quantised; 0 if no weight is quantised during loading."""

    @property
    def frozen(self) -> list[Tensor]:
        return [tensor for tensor in self.tensors.values() if not tensor.requires_grad]

    @property
    def adapter(self) -> list[Tensor]:
        return [tensor for tensor in self.tensors.values() if tensor.requires_grad]

    @property
    def base(self) -> list[Tensor]:
        """The frozen tensors without the adapter's fixed tensors."""
        return [tensor for tensor in self.frozen if tensor not in self.in_checkpoint]

    @property
    def base_bytes(self) -> int:
        """Bytes of all frozen tensors."""
        return sum(tensor.nbytes for tensor in self.frozen)

    @property
    def adapter_bytes(self) -> int:
        """Bytes of all trainable tensors."""
        return sum(tensor.nbytes for tensor in self.adapter)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the adapter's fixed tensors, such as A0 and B0 of PiSSA."""
        return sum(tensor.nbytes for tensor in self.frozen if tensor in self.in_checkpoint)

    def bytes_of_groups(self, tensors: Iterable[Tensor]) -> dict[str, int]:
        """Return group -> bytes of those tensors that it has."""
        sizes: Counter[str] = Counter()
        for tensor in tensors:
            sizes[self.groups.get(tensor, ROOT)] += tensor.nbytes
        return dict(sizes)


def shapes_of(model: nn.Module) -> ModelShapes:
    """Return the shapes of an adapted model on meta."""
    config: Any = model.config
    config = config.get_text_config()
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    module_names = {module: name for name, module in model.named_modules()} | {embedding: EMBEDDING}
    lists = list(layer_lists(model))
    parts: list[tuple[int | str, nn.Module]] = list(enumerate(lists[0])) if len(lists) == 1 else []
    parts += [(EMBEDDING, embedding), (HEAD, model.get_output_embeddings())]  # type: ignore[operator]
    uses: dict[Tensor, set[int | str]] = {}
    for use, part in parts:
        for tensor in () if part is None else part.parameters():
            uses.setdefault(tensor, set()).add(use)
    weights = [weight for weight in map(quantized_weight, model.modules()) if weight is not None]
    return ModelShapes(
        tensors=dict(model.named_parameters()),
        in_checkpoint=set(checkpoint_tensors(model).values()),
        groups={tensor: module_names[part] for part in gather_groups(model) for tensor in part.parameters()},
        uses=uses,
        hidden_size=int(config.hidden_size),
        num_layers=int(config.num_hidden_layers),
        quantization=weights[0].scheme.name if weights else "",
        quantizing_bytes=max(map(quantizing_bytes, weights), default=0),
    )


def read_stored_dtype(folder: Path) -> torch.dtype | None:
    """Return the dtype of most bytes of a base, from the headers of its files, else from its config."""
    sizes: Counter[torch.dtype] = Counter()
    with contextlib.suppress(BaseModelError):  # of missing or truncated weights, for which the config must do
        for shard in open_base_files(folder).shards:
            for entry in shard.entries.values():
                sizes[entry.dtype] += entry.end - entry.start
    if sizes:
        return sizes.most_common(1)[0][0]
    config = read_json(folder / "config.json")
    return parse_dtype(config.get("dtype") or config.get("torch_dtype"))
