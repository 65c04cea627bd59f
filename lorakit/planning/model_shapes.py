"""Shapes of every tensor of a base with its adapter, from the model on the meta device.

Of weight files only the headers are read, so a base with missing or truncated weights can be planned for.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from lorakit.base.adapter_spec import adapter_spec
from lorakit.base.dropout import disable_dropout
from lorakit.base.find import find_tokenizer
from lorakit.base.layers import gather_groups, layer_lists
from lorakit.base.load import load_skeleton
from lorakit.base.quantized import quantized_weight
from lorakit.base.skeleton import quantize_skeleton, quantizing_bytes
from lorakit.errors import PatchError
from lorakit.files.base_files import INDEX, SINGLE
from lorakit.files.dtypes import DTYPE_OF_CODE, parse_dtype
from lorakit.files.safetensors import read_header
from lorakit.lora import attach, find_targets
from lorakit.lora.inject import adapter_tensors, checkpoint_tensors
from lorakit.ops.fuse import fuse_model
from lorakit.parallel.tensor import checked_plan, cut_dims
from lorakit.parallel.tensor.shards import CutDim
from lorakit.recipe import AdapterSection, BaseSection

ROOT: Final = "root"
"""The gather group of all tensors outside the repeated layers."""
EMBEDDING: Final = "embedding"
HEAD: Final = "head"
"""Uses of a tensor, besides the index of the layer that has it."""


@dataclass(frozen=True)
class TensorShape:
    """One tensor of the adapted base."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    trainable: bool
    in_checkpoint: bool
    """True for trainable tensors and for the adapter's fixed tensors."""
    group: str
    """Name of the module with which a sharding engine gathers the tensor, or ROOT."""
    num_values: int
    """Model parameters that the tensor stores: all of a quantised weight's, none for its scales."""
    uses: frozenset[int | str] = frozenset()
    """The layer, by index, the EMBEDDING or the HEAD that computes with the tensor, or several of them; empty for the
    last norm, and in a model that is not one list of layers."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def is_matrix(self) -> bool:
        """True if the tensor is a factor of matrix products. A 4-bit weight counts, although it is stored flat."""
        return len(self.shape) > 1 or self.num_values > self.numel


@dataclass(frozen=True)
class ModelShapes:
    """The tensors of a base with its adapter. A tied tensor counts once."""

    architecture: str
    tensors: tuple[TensorShape, ...]
    embedding: str | None
    head: str | None
    """Tensor names of input embedding and output head, equal if tied. None: the model has none."""
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    """Heads of queries, and of keys and values, in one layer."""
    head_size: int
    num_layers: int
    stored_dtype: torch.dtype | None
    """dtype of most bytes in the weight files; None if neither files nor config give one."""
    quantization: str = ""
    """Name of the quantisation scheme; empty for a base in floats."""
    quantizing_bytes: int = 0
    """Most bytes allocated while one weight is quantised; 0 if no weight is quantised during loading."""
    cut_dims: Mapping[str, CutDim] = field(default_factory=dict)
    """Tensor name -> the dimension of which a rank has a part, where ranks share each weight."""

    @property
    def attention_width(self) -> int:
        """Number of heads times head size, in one layer."""
        return self.num_heads * self.head_size

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
    def cuts_experts(self) -> bool:
        """True if ranks share each expert, of which gate and up are one tensor."""
        return any(cut.pieces > 1 for cut in self.cut_dims.values())

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the adapter's fixed tensors, such as A0 and B0 of PiSSA."""
        return sum(tensor.nbytes for tensor in self.frozen if tensor.in_checkpoint)

    def part(self, num_ranks: int) -> "ModelShapes":
        """Return the shapes of rank 0's part, where so many ranks share each weight; unchanged for one."""
        if num_ranks == 1:
            return self
        tensors = []
        for tensor in self.tensors:
            cut, shape = self.cut_dims.get(tensor.name), list(tensor.shape)
            if cut is not None:
                dim = min(cut.dim, len(shape) - 1)  # 4-bit weights are stored flat
                shape[dim] = cut.pieces * math.ceil(shape[dim] / cut.pieces / num_ranks)
            share = math.prod(shape) / max(1, tensor.numel)
            tensors.append(replace(tensor, shape=tuple(shape), num_values=round(tensor.num_values * share)))
        kv_heads = max(1, self.num_kv_heads // num_ranks)
        return replace(self, tensors=tuple(tensors), num_heads=self.num_heads // num_ranks, num_kv_heads=kv_heads)

    def base_bytes_of_layers(self) -> list[int]:
        """Return the bytes of base tensors in each repeated layer."""
        sizes: Counter[str] = Counter()
        for tensor in self.base:
            if tensor.group != ROOT and tensor.name != self.embedding:
                sizes[tensor.group] += tensor.nbytes
        return list(sizes.values())

    def bytes_of_groups(self) -> dict[str, int]:
        """Return group -> bytes of all its tensors."""
        sizes: Counter[str] = Counter()
        for tensor in self.tensors:
            sizes[tensor.group] += tensor.nbytes
        return dict(sizes)

    def num_matmul_parameters(self) -> int:
        """Count the frozen weights in matrix products: all matrices but an embedding that is not tied to the head."""
        lookup_only = self.embedding if self.embedding != self.head else None
        return sum(t.num_values for t in self.frozen if t.is_matrix and t.name != lookup_only)


def read_shapes(
    folder: Path, base: BaseSection, adapter: AdapterSection, dtype: torch.dtype, tensor: int = 1
) -> ModelShapes:
    """Return the shapes of the base in a folder, in ``dtype`` or quantised, with the adapter of a recipe.

    tensor: how many ranks may share each weight.

    Raises:
        RunError: they cannot.
        BaseModelError: no config, an architecture unknown to transformers, or an unsupported quantisation.
        TargetError: the adapter does not fit the base.
    """
    model = adapted_skeleton(folder, base, adapter, dtype)
    shapes = shapes_of(model, read_stored_dtype(folder))
    if tensor > 1:
        shapes = replace(shapes, cut_dims=cut_dims(model, checked_plan(model, tensor)))
    # without the recipe key, quantised layers come from quantised files, which are read as they are
    return shapes if base.quantize != "none" else replace(shapes, quantizing_bytes=0)


def adapted_skeleton(folder: Path, base: BaseSection, adapter: AdapterSection, dtype: torch.dtype) -> nn.Module:
    """Build the base of a folder as training does, on meta: ``dtype``, quantised, adapted, its parts fused."""
    model = load_skeleton(folder)
    disable_dropout(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    quantize_skeleton(model, base, folder, dtype)
    spec = adapter_spec(adapter, find_tokenizer(base.tokenizer, folder))
    targets = find_targets(model, spec)
    with torch.device("meta"):
        attach(model, targets, spec, seed=0)
    fuse_model(model)
    return model


def shapes_of(model: nn.Module, stored_dtype: torch.dtype | None) -> ModelShapes:
    """Return the shapes of an adapted model."""
    config: Any = model.config
    config = config.get_text_config()
    trainable = {id(tensor) for tensor in adapter_tensors(model).values()}
    in_checkpoint = {id(tensor) for tensor in checkpoint_tensors(model).values()}
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    groups, num_values, uses = _groups(model), _quantized_num_values(model), _uses(model)
    weights = [weight for weight in map(quantized_weight, model.modules()) if weight is not None]
    hidden_size, num_heads = int(config.hidden_size), int(getattr(config, "num_attention_heads", 0) or 1)
    return ModelShapes(
        architecture=type(model).__name__,
        tensors=tuple(
            TensorShape(
                name=name,
                shape=tuple(tensor.shape),
                itemsize=tensor.dtype.itemsize,
                trainable=id(tensor) in trainable,
                in_checkpoint=id(tensor) in in_checkpoint,
                group=groups.get(id(tensor), ROOT),
                num_values=num_values.get(id(tensor), tensor.numel()),
                uses=frozenset(uses.get(id(tensor), ())),
            )
            for name, tensor in model.named_parameters()
        ),
        embedding=_weight_name(model, "get_input_embeddings", names),
        head=_weight_name(model, "get_output_embeddings", names),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or num_heads),
        head_size=int(getattr(config, "head_dim", None) or hidden_size // num_heads),
        num_layers=int(config.num_hidden_layers),
        stored_dtype=stored_dtype,
        quantization=weights[0].scheme.name if weights else "",
        quantizing_bytes=max(map(quantizing_bytes, weights), default=0),
    )


def read_stored_dtype(folder: Path) -> torch.dtype | None:
    """Return the dtype of most bytes of a base, from the headers of its files, else from its config."""
    sizes: Counter[torch.dtype] = Counter()
    for path in _weight_files(folder):
        for facts in _header(path).values():
            if isinstance(facts, dict) and facts.get("dtype") in DTYPE_OF_CODE and isinstance(facts.get("shape"), list):
                dtype = DTYPE_OF_CODE[facts["dtype"]]
                sizes[dtype] += math.prod(facts["shape"]) * dtype.itemsize
    if sizes:
        return sizes.most_common(1)[0][0]
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return parse_dtype(config.get("dtype") or config.get("torch_dtype"))


def _weight_files(folder: Path) -> Iterable[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    try:
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    except (OSError, ValueError, KeyError):
        return []
    return [folder / Path(str(name)).name for name in sorted(set(weight_map.values()))]


def _header(path: Path) -> dict[str, Any]:
    """Read the JSON header of a safetensors file; empty if the file is missing or its header unreadable."""
    try:
        return read_header(path)
    except PatchError:
        return {}


def _groups(model: nn.Module) -> dict[int, str]:
    names = {module: name for name, module in model.named_modules()}
    return {id(tensor): names[part] for part in gather_groups(model) for tensor in part.parameters()}


def _uses(model: nn.Module) -> dict[int, set[int | str]]:
    """Return id of a tensor -> the layers by index, embedding and head that compute with it."""
    lists = list(layer_lists(model))
    parts: list[tuple[int | str, nn.Module]] = list(enumerate(lists[0])) if len(lists) == 1 else []
    parts += [(EMBEDDING, model.get_input_embeddings()), (HEAD, model.get_output_embeddings())]  # type: ignore[operator]
    uses: dict[int, set[int | str]] = {}
    for use, part in parts:
        for tensor in () if part is None else part.parameters():
            uses.setdefault(id(tensor), set()).add(use)
    return uses


def _quantized_num_values(model: nn.Module) -> dict[int, int]:
    """Return id of a quantised layer's tensor -> number of model parameters that the tensor stores."""
    counts = {}
    for layer in model.modules():
        weight = quantized_weight(layer)
        for name in () if weight is None else weight.scheme.shapes(*weight.shape):
            assert weight is not None
            counts[id(layer.get_parameter(name))] = math.prod(weight.shape) if name == "weight" else 0
    return counts


def _weight_name(model: nn.Module, getter: str, names: dict[int, str]) -> str | None:
    module = getattr(model, getter)()
    return names.get(id(module.weight)) if module is not None else None


def largest_layer_list(model: nn.Module) -> tuple[nn.Module, str, nn.ModuleList]:
    """Return (parent, attribute name, layers) of the list of layers with most parameters: the decoder's."""
    lists = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList)
    ]
    return max(lists, key=lambda layers: sum(p.numel() for p in layers[2].parameters()))
