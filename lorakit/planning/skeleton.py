"""Build the base of a recipe with its adapter on meta, as a run would: for `check`, `plan` and the start of `train`.

Invariant: the same layers are quantised, adapted and fused as in a run, so that refusals, sizes and allocations are a
run's. No weight is read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lorakit.base.from_recipe import adapter_spec
from lorakit.base.loading import disable_dropout, dropout_notes
from lorakit.base.quantized import (
    QuantConfig,
    count_parameters,
    layers_to_quantize,
    linear_layers,
    quant_config,
    replace_with_quantized,
)
from lorakit.base.transformers_io import load_skeleton
from lorakit.files.patterns import matches_beginning
from lorakit.lora import AdapterSpec, adapter_tensors, attach, find_targets
from lorakit.lora.extra_targets import find_extra_targets
from lorakit.lora.inject import ReadWeight
from lorakit.lora.layer_kinds import expert_parameters
from lorakit.lora.targets import Coverage, adapter_notes, coverage_of, embedding_and_head, layers_left_out
from lorakit.ops.fuse import FuseReport, fuse_model
from lorakit.planning.memory_counter import META
from lorakit.quant.files import GGUF, configured_scheme, quantization_config
from lorakit.quant.linear import QuantizationInfo
from lorakit.quant.published import METHODS, Mxfp4
from lorakit.quant.schemes import gguf_schemes
from lorakit.recipe import Recipe


@dataclass(frozen=True)
class AttachedFacts:
    """Facts of an adapter on its base. coverage: share of products that it changes. notes: sentences for the user."""

    architecture: str
    num_parameters: int
    num_trainable: int
    coverage: Coverage
    notes: tuple[str, ...]


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
    # as a run would quantise it: by config.json, or else by the recipe
    config = _stored_config(folder, model) or quant_config(
        base.quantize, double_quant=base.double_quantize, skip=base.skip_modules
    )
    if config is not None:
        # cached now, because the tables are computed from values, which a trace on meta does not have
        config.scheme.code_tables(META)
        for name, weight in layers_to_quantize(folder, model, config, dtype).items():
            replace_with_quantized(model, name, weight)
    with META:
        facts = attach_adapter(model, spec, dropout, seed=0)
    return AdaptedSkeleton(folder, model, spec, facts, fuse_model(model))


def attach_adapter(
    model: nn.Module, spec: AdapterSpec, dropout: Mapping[str, float], seed: int, read_weight: ReadWeight | None = None
) -> AttachedFacts:
    """Put an untrained adapter on a base, perhaps on meta. Raises TargetError. dropout: rates that are off now."""
    targets = find_targets(model, spec)
    experts = find_extra_targets(model, spec, targets).experts
    # before `attach`, which adds parameters that are not the base's
    coverage = coverage_of(model, {target.name for target in targets} | {expert.name for expert in experts})
    num_parameters = count_parameters(model)
    left_out = layers_left_out(model)
    attach(model, spec, seed, read_weight)
    num_trainable = sum(tensor.numel() for tensor in adapter_tensors(model).values())
    notes = (*dropout_notes(dropout), *adapter_notes(coverage, spec, left_out))
    return AttachedFacts(type(model).__name__, num_parameters, num_trainable, coverage, notes)


def quantizing_bytes(weight: QuantizationInfo) -> int:
    """Return the bytes in memory while one weight is quantised: the weight, working memory and the result."""
    size = math.prod(weight.shape)
    tensors = weight.scheme.shapes(*weight.shape).values()
    result = sum(math.prod(shape) * dtype.itemsize for shape, dtype in tensors)
    return size * weight.dtype.itemsize + weight.scheme.working_bytes(size) + result


def _stored_config(folder: Path, model: nn.Module) -> QuantConfig | None:
    """Return the files' quantisation, by transformers' rule: all but the head, or but those that config.json lists."""
    stored = quantization_config(folder)
    if stored is None:
        return None
    if stored.get("quant_method") == GGUF:
        own = gguf_schemes(stored)
        return QuantConfig(next(iter(own.values())), layers=own)
    # of bitsandbytes with 4 bits too; of fp8 and awq; of compressed-tensors
    lists = (stored.get(key) for key in ("llm_int8_skip_modules", "modules_to_not_convert", "ignore"))
    skipped = next((names for names in lists if names is not None), None)
    _, head = embedding_and_head(model)
    names = [
        name for name in linear_layers(model) if (name != head if skipped is None else not _is_skipped(name, skipped))
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
