"""Shapes of every tensor of a base with its adapter, from the model on the meta device.

Of weight files only the headers are read, so a base with missing or truncated weights can be planned for.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from lorakit.base.layers import gather_groups, layer_lists
from lorakit.base.quantized import quantized_weight
from lorakit.errors import BaseModelError
from lorakit.files.base_files import open_base_files, read_json
from lorakit.files.dtypes import parse_dtype
from lorakit.lora.inject import adapter_tensors, checkpoint_tensors
from lorakit.planning.skeleton import quantizing_bytes

ROOT: Final = "root"  # The gather group of all tensors outside the repeated layers and an untied embedding.
EMBEDDING: Final = "embedding"
HEAD: Final = "head"
"""Uses of a tensor, besides the index of the layer that has it. EMBEDDING is an untied embedding's gather group too."""


@dataclass(frozen=True)
class TensorShape:
    """One tensor of the adapted base."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    trainable: bool
    in_checkpoint: bool  # True for trainable tensors and for the adapter's fixed tensors.
    group: str  # The tensors that a sharding engine gathers together: the name of a layer, EMBEDDING or ROOT.
    uses: frozenset[int | str] = frozenset()
    """The layer, by index, the EMBEDDING or the HEAD that computes with the tensor, or several of them; empty for the
    last norm, and in a model that is not one list of layers."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class ModelShapes:
    """The tensors of a base with its adapter. A tied tensor counts once."""

    tensors: tuple[TensorShape, ...]
    hidden_size: int
    num_layers: int
    quantization: str = ""  # Name of the quantisation scheme; empty for a base in floats.
    quantizing_bytes: int = 0
    """Most bytes allocated while one weight is quantised; 0 if no weight is quantised during loading."""

    @property
    def frozen(self) -> tuple[TensorShape, ...]:
        return tuple(tensor for tensor in self.tensors if not tensor.trainable)

    @property
    def adapter(self) -> tuple[TensorShape, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.trainable)

    @property
    def base(self) -> tuple[TensorShape, ...]:
        """The frozen tensors without the adapter's fixed tensors."""
        return tuple(tensor for tensor in self.frozen if not tensor.in_checkpoint)

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
        return sum(tensor.nbytes for tensor in self.frozen if tensor.in_checkpoint)


def bytes_of_groups(tensors: Iterable[TensorShape]) -> dict[str, int]:
    """Return group -> bytes of its tensors."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.group] += tensor.nbytes
    return dict(sizes)


def shapes_of(model: nn.Module) -> ModelShapes:
    """Return the shapes of an adapted model on meta."""
    config: Any = model.config
    config = config.get_text_config()
    trainable = {id(tensor) for tensor in adapter_tensors(model).values()}
    in_checkpoint = {id(tensor) for tensor in checkpoint_tensors(model).values()}
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    module_names = {module: name for name, module in model.named_modules()} | {embedding: EMBEDDING}
    groups = {id(tensor): module_names[part] for part in gather_groups(model) for tensor in part.parameters()}
    lists = list(layer_lists(model))
    parts: list[tuple[int | str, nn.Module]] = list(enumerate(lists[0])) if len(lists) == 1 else []
    parts += [(EMBEDDING, embedding), (HEAD, model.get_output_embeddings())]  # type: ignore[operator]
    uses: dict[int, set[int | str]] = {}  # id of a tensor -> the parts that compute with it
    for use, part in parts:
        for tensor in () if part is None else part.parameters():
            uses.setdefault(id(tensor), set()).add(use)
    weights = [weight for weight in map(quantized_weight, model.modules()) if weight is not None]
    return ModelShapes(
        tensors=tuple(
            TensorShape(
                name=name,
                shape=tuple(tensor.shape),
                itemsize=tensor.dtype.itemsize,
                trainable=id(tensor) in trainable,
                in_checkpoint=id(tensor) in in_checkpoint,
                group=groups.get(id(tensor), ROOT),
                uses=frozenset(uses.get(id(tensor), ())),
            )
            for name, tensor in model.named_parameters()
        ),
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
