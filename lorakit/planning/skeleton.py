"""Build the base of a recipe with its adapter on meta, as a run would: for `check`, `plan` and the start of `train`.

Invariant: the same layers are quantised, adapted and fused as in a run, so that refusals, sizes and allocations are a
run's. No weight is read: of weight files only the headers, so a base with missing or truncated weights can be planned
for.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from lorakit.base.from_recipe import adapter_spec
from lorakit.base.layers import gather_groups, layer_lists
from lorakit.base.loading import disable_dropout, dropout_notes
from lorakit.base.quantized import (
    QuantConfig,
    check_scheme,
    count_parameters,
    describe_quantization,
    layers_to_quantize,
    linear_layers,
    quant_config,
    quantized_weight,
    replace_with_quantized,
)
from lorakit.base.transformers_io import load_skeleton
from lorakit.errors import BaseModelError
from lorakit.files.base_files import open_base_files, read_json
from lorakit.files.patterns import matches_beginning
from lorakit.files.safetensors import MODEL_DTYPES, parse_dtype
from lorakit.lora import AdapterSpec, adapter_tensors, attach, find_targets
from lorakit.lora.extra_targets import find_extra_targets
from lorakit.lora.inject import ReadWeight, checkpoint_tensors
from lorakit.lora.layer_kinds import expert_parameters
from lorakit.lora.targets import Coverage, adapter_notes, coverage_of, embedding_and_head, layers_left_out
from lorakit.ops.fuse import FuseReport, fuse_model
from lorakit.quant.files import GGUF, configured_scheme, quantization_config
from lorakit.quant.linear import QuantizationInfo
from lorakit.quant.published import METHODS, Mxfp4
from lorakit.quant.schemes import gguf_schemes
from lorakit.recipe import Recipe

META: Final = torch.device("meta")
ROOT: Final = "root"  # The gather group of all tensors outside the repeated layers and an untied embedding.
EMBEDDING: Final = "embedding"
HEAD: Final = "head"
"""Uses of a tensor, besides the index of the layer that has it. EMBEDDING is an untied embedding's gather group too."""


@dataclass(frozen=True)
class AttachedFacts:
    """Facts of an adapter on its base. coverage: share of products that it changes. notes: sentences for the user."""

    architecture: str
    num_parameters: int
    num_trainable: int
    coverage: Coverage
    notes: tuple[str, ...]
    quantization: str | None  # of the base, for the user


@dataclass(frozen=True)
class AdaptedSkeleton:
    """A base on meta with an untrained adapter. fused: the parts that would run fused."""

    folder: Path
    model: nn.Module
    spec: AdapterSpec
    facts: AttachedFacts
    fused: FuseReport


def adapted_skeleton(folder: Path, recipe: Recipe, dtype: torch.dtype = torch.float32) -> AdaptedSkeleton:
    """Build a recipe's base on meta: quantised, adapted, fused. Raises as a run."""
    base = recipe.base
    spec = adapter_spec(recipe, folder)
    model = load_skeleton(folder)
    dropout = disable_dropout(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    requested = quant_config(base.quantize, double_quant=base.double_quantize, skip=base.skip_modules)
    quantize_skeleton(folder, model, dtype, requested)
    # cached now, because the tables are computed from values, which a trace on meta does not have
    for scheme in {weight.scheme for weight in map(quantized_weight, model.modules()) if weight is not None}:
        scheme.code_tables(META)
    with META:
        facts = attach_adapter(model, spec, dropout, seed=0)
    return AdaptedSkeleton(folder, model, spec, facts, fuse_model(model))


def quantize_skeleton(folder: Path, model: nn.Module, dtype: torch.dtype, requested: QuantConfig | None = None) -> None:
    """Quantise a base on meta as a run would: by config.json, or else as ``requested``."""
    if (config := _stored_config(folder, model) or requested) is not None:
        check_scheme(folder, (config.layers or {}).values(), requested)
        for name, weight in layers_to_quantize(folder, model, config, dtype).items():
            replace_with_quantized(model, name, weight)


def attach_adapter(
    model: nn.Module, spec: AdapterSpec, dropout: Mapping[str, float], seed: int, read_weight: ReadWeight | None = None
) -> AttachedFacts:
    """Put an untrained adapter on a base, perhaps on meta. Raises TargetError. dropout: rates that are off now."""
    targets = find_targets(model, spec)
    experts = find_extra_targets(model, spec, targets).experts
    # before `attach`, which adds parameters that are not the base's
    coverage = coverage_of(model, {target.name for target in targets} | {expert.name for expert in experts})
    num_parameters = count_parameters(model)
    quantization = describe_quantization(model)
    left_out = layers_left_out(model)
    attach(model, spec, seed, read_weight)
    num_trainable = sum(tensor.numel() for tensor in adapter_tensors(model).values())
    notes = (*dropout_notes(dropout), *adapter_notes(spec, left_out))
    return AttachedFacts(type(model).__name__, num_parameters, num_trainable, coverage, notes, quantization)


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
    quantizing_bytes: int = 0  # Most bytes allocated while a weight is quantised; 0 if none is during loading.

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


def quantizing_bytes(weight: QuantizationInfo) -> int:
    """Return the bytes in memory while one weight is quantised: the weight, working memory and the result."""
    size = math.prod(weight.shape)
    tensors = weight.scheme.shapes(*weight.shape).values()
    result = sum(math.prod(shape) * dtype.itemsize for shape, dtype in tensors)
    return size * weight.dtype.itemsize + weight.scheme.working_bytes(size) + result


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


def _stored_config(folder: Path, model: nn.Module) -> QuantConfig | None:
    """Return the files' quantisation, by transformers' rule: all but the head, or but those that config.json lists."""
    stored = quantization_config(folder)
    if stored is None:
        return None
    if stored.get("quant_method") == GGUF:
        own = gguf_schemes(stored)
        return QuantConfig(next(iter(own.values())), layers=own)
    # of bitsandbytes with 4 bits too; of fp8 and awq; of compressed-tensors
    lists = (stored.get(key) for key in ("llm_int8_skip_modules", "modules_to_not_convert", "skip_modules", "ignore"))
    skipped = next((names for names in lists if names is not None), None)
    try:
        if isinstance(skipped, str):
            raise TypeError
        _is_skipped("", skipped or [])
    except (TypeError, AttributeError, ValueError):
        problem = f"{str(skipped)[:200]!r} is no list of patterns of layers to skip"
        raise BaseModelError(f"{folder}: quantization_config: {problem}") from None
    _, head = embedding_and_head(model)
    floats = set[str]()  # layers that no list has
    with contextlib.suppress(BaseModelError):  # of missing or truncated weights
        files = open_base_files(folder)
        floats |= {name for name in files.shard_of if files.entry(name).dtype in MODEL_DTYPES.values()}
    names = [
        name
        for name in linear_layers(model)
        if (name != head if skipped is None else not _is_skipped(name, skipped)) and f"{name}.weight" not in floats
    ]
    scheme = configured_scheme(folder, stored)
    if stored.get("quant_method") in METHODS:
        experts = [name for name, _ in expert_parameters(model) if not _is_skipped(name, skipped or [])]
        names = experts if isinstance(scheme, Mxfp4) else names + experts
    return QuantConfig(scheme, layers=dict.fromkeys(names, scheme))


def _is_skipped(name: str, patterns: list[Any]) -> bool:
    """True if a pattern matches by transformers' rule: from the start up to a dot, or at the end."""
    patterns = [key.removeprefix("re:") for key in patterns]
    return any(name.endswith(key) or matches_beginning(rf"(?:{key})(?:(?<=\.)|(?=\.|$))", name) for key in patterns)
