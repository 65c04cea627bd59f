"""What a base is, from its config and its model on the meta device: every tensor's shape, and nothing of its values.

A base whose weights are not there, or cut short, can be planned for: of the files only headers are read.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from lorakit.base.adapter_spec import adapter_spec
from lorakit.base.layers import gather_groups
from lorakit.base.load import load_skeleton
from lorakit.base.skeleton import bytes_to_pack, facts_of, pack_skeleton
from lorakit.files.base_files import INDEX, SINGLE
from lorakit.files.safetensors import DTYPES, MAX_HEADER_BYTES
from lorakit.lora import attach, find_targets
from lorakit.lora.inject import adapter_tensors, checkpoint_tensors
from lorakit.recipe import AdapterSection, BaseSection

ROOT: Final = "root"
"""The group of what belongs to no layer."""


@dataclass(frozen=True)
class TensorShape:
    """One tensor of the adapted base. ``group`` names the module that a sharding engine gathers it with."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    trains: bool
    kept: bool
    """Whether checkpoints hold it: what learns, and what else is the adapter's own."""
    group: str
    num_values: int
    """What it stands for: a packed weight for all its values, the scales beside it for none."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def is_matrix(self) -> bool:
        """Whether it takes part in products; a weight in 4 bits is stored flat."""
        return len(self.shape) > 1 or self.num_values > self.numel


@dataclass(frozen=True)
class ModelShapes:
    """The tensors of a base with its adapter; a tied tensor is one."""

    architecture: str
    pieces: tuple[TensorShape, ...]
    embedding: str | None
    head: str | None
    """Names of the tensors of input embedding and output head; the same when they are tied."""
    hidden_size: int
    attention_width: int
    """Heads times their size, of a layer."""
    num_layers: int
    stored_dtype: torch.dtype | None
    """Of most of what the files hold; None when they say nothing."""
    packing: str = ""
    """How the base is packed, in words; empty when it is in floats."""
    packing_bytes: int = 0
    """Taken while the largest weight is packed; 0 when none is."""

    @property
    def frozen(self) -> tuple[TensorShape, ...]:
        return tuple(piece for piece in self.pieces if not piece.trains)

    @property
    def adapter(self) -> tuple[TensorShape, ...]:
        return tuple(piece for piece in self.pieces if piece.trains)

    @property
    def base(self) -> tuple[TensorShape, ...]:
        """The frozen tensors that are not the adapter's own."""
        return tuple(piece for piece in self.frozen if not piece.kept)

    @property
    def fixed_bytes(self) -> int:
        """Of the adapter's own tensors that do not learn."""
        return sum(piece.nbytes for piece in self.frozen if piece.kept)

    def base_bytes_of_layers(self) -> list[int]:
        """Of the base in each repeated layer."""
        found: Counter[str] = Counter()
        for piece in self.base:
            if piece.group != ROOT and piece.name != self.embedding:
                found[piece.group] += piece.nbytes
        return list(found.values())

    def bytes_of_groups(self) -> dict[str, int]:
        """group -> bytes of all its tensors."""
        found: Counter[str] = Counter()
        for piece in self.pieces:
            found[piece.group] += piece.nbytes
        return dict(found)

    def num_matmul_parameters(self) -> int:
        """Weights that take part in matrix products: matrices, without an embedding that is only looked up in."""
        looked_up = self.embedding if self.embedding != self.head else None
        return sum(p.num_values for p in self.frozen if p.is_matrix and p.name != looked_up)


def read_shapes(folder: Path, base: BaseSection, adapter: AdapterSection, dtype: torch.dtype) -> ModelShapes:
    """The shapes of a base in a folder, with the adapter of a recipe, the base in ``dtype`` or packed.

    Raises:
        BaseModelError: no config, an architecture transformers does not know, or packed as lorakit cannot read.
        TargetError: the adapter does not go onto it.
    """
    shapes = shapes_of(adapted_skeleton(folder, base, adapter, dtype), stored_dtype(folder))
    return shapes if base.quantize != "none" else replace(shapes, packing_bytes=0)


def adapted_skeleton(folder: Path, base: BaseSection, adapter: AdapterSection, dtype: torch.dtype) -> nn.Module:
    """The base of a folder in ``dtype`` or packed, with an adapter on it, all of it on the meta device."""
    model = load_skeleton(folder)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    pack_skeleton(model, base, folder, dtype)
    spec = adapter_spec(adapter, folder)
    targets = find_targets(model, spec)
    with torch.device("meta"):
        return attach(model, targets, spec, seed=0)


def shapes_of(model: nn.Module, stored: torch.dtype | None) -> ModelShapes:
    """The shapes of an adapted model."""
    config: Any = model.config
    config = config.get_text_config()
    trained = {id(tensor) for tensor in adapter_tensors(model).values()}
    kept = {id(tensor) for tensor in checkpoint_tensors(model).values()}
    groups, values = _groups(model), _values(model)
    pieces = tuple(
        TensorShape(
            name, tuple(tensor.shape), tensor.dtype.itemsize, id(tensor) in trained, id(tensor) in kept,
            groups.get(id(tensor), ROOT), values.get(id(tensor), tensor.numel()),
        )
        for name, tensor in model.named_parameters()
    )  # fmt: skip
    packed = [facts for facts in map(facts_of, model.modules()) if facts is not None]
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    hidden, heads = int(config.hidden_size), int(getattr(config, "num_attention_heads", 0) or 1)
    return ModelShapes(
        type(model).__name__, pieces, _weight_name(model, "get_input_embeddings", names),
        _weight_name(model, "get_output_embeddings", names), hidden,
        heads * int(getattr(config, "head_dim", None) or hidden // heads), int(config.num_hidden_layers), stored,
        packed[0].scheme.name if packed else "", max(map(bytes_to_pack, packed), default=0),
    )  # fmt: skip


def stored_dtype(folder: Path) -> torch.dtype | None:
    """The dtype of most bytes of a base's files, as their headers or else its config say. No tensor is read."""
    sizes: Counter[torch.dtype] = Counter()
    for path in _weight_files(folder):
        for facts in _header(path).values():
            if isinstance(facts, dict) and facts.get("dtype") in DTYPES and isinstance(facts.get("shape"), list):
                sizes[DTYPES[facts["dtype"]]] += math.prod(facts["shape"]) * DTYPES[facts["dtype"]].itemsize
    if sizes:
        return sizes.most_common(1)[0][0]
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    told = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    return told if isinstance(told, torch.dtype) else None


def _weight_files(folder: Path) -> Iterable[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    try:
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    except (OSError, ValueError, KeyError):
        return []
    return [folder / Path(str(name)).name for name in sorted(set(weight_map.values()))]


def _header(path: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file; empty for one that is not there or has none."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length <= MAX_HEADER_BYTES else None
    except (OSError, ValueError):
        return {}
    return header if isinstance(header, dict) else {}


def _groups(model: nn.Module) -> dict[int, str]:
    names = {module: name for name, module in model.named_modules()}
    return {id(tensor): names[part] for part in gather_groups(model) for tensor in part.parameters()}


def _values(model: nn.Module) -> dict[int, int]:
    """Tensor of a packed layer -> how many values it stands for."""
    found = {}
    for layer in model.modules():
        facts = facts_of(layer)
        for name in () if facts is None else facts.scheme.shapes(*facts.shape):
            assert facts is not None
            found[id(layer.get_parameter(name))] = math.prod(facts.shape) if name == "weight" else 0
    return found


def _weight_name(model: nn.Module, getter: str, names: dict[int, str]) -> str | None:
    module = getattr(model, getter)()
    return names.get(id(module.weight)) if module is not None else None


def repeated_layers(model: nn.Module) -> tuple[nn.Module, str, nn.ModuleList]:
    """(parent, name, layers) of the longest list of layers of a model: its decoder's."""
    lists = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in _children(parent)
    ]  # fmt: skip
    return max(lists, key=lambda found: sum(p.numel() for p in found[2].parameters()))


def _children(parent: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    for name, child in parent.named_children():
        if isinstance(child, nn.ModuleList):
            yield name, child
