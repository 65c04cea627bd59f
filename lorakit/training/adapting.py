"""A recipe's adapter meets its base."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from lorakit.base.adapter_spec import adapter_spec
from lorakit.base.load import num_tokens
from lorakit.base.loading import LoadedBase, count_parameters, load_for_training
from lorakit.data import TokenDataset
from lorakit.errors import BaseModelError, TargetError
from lorakit.lora import LoraLinear, adapter_modules, adapter_tensors, attach, find_targets
from lorakit.lora.coverage import Coverage, covering
from lorakit.lora.experts import LoraExperts
from lorakit.lora.extra_targets import find_extras
from lorakit.parallel import Engine
from lorakit.recipe import Recipe


@dataclass(frozen=True)
class AdaptedBase:
    """A base with an untrained adapter on it."""

    base: LoadedBase
    covering: Coverage
    note: str | None
    """what is to be said of a covering that is small"""
    num_parameters: int
    """of the base"""
    num_trainable: int


def adapted_base(
    recipe: Recipe, engine: Engine, folder: Path, dtype: torch.dtype, sets: Sequence[TokenDataset | None]
) -> AdaptedBase:
    """The base with an untrained adapter; without weights when the engine reads each process's part of them."""
    base = load_for_training(recipe.base, folder, dtype, engine.device, sharded=engine.shards_base)
    for rows in filter(None, sets):
        check_vocabulary(base.model, rows)
    spec = adapter_spec(recipe.adapter, folder)
    if sets[0] is not None:
        check_tokens_occur(spec.trainable_tokens, sets[0])
    targets = find_targets(base.model, spec)
    reached = {target.name for target in targets} | {e.name for e in find_extras(base.model, spec, targets).experts}
    covered, total = covering(base.model, reached), count_parameters(base.model)
    attach(base.model, targets, spec, recipe.train.seed, base.stored, compiled=recipe.train.compile)
    trainable = sum(tensor.numel() for tensor in adapter_tensors(base.model).values())
    return AdaptedBase(base, covered, covered.note(spec), total, trainable)


def adapted_names(model: nn.Module) -> list[str]:
    """The layers, and the parameters of experts, that carry low-rank factors."""
    names = []
    for name, carrier in adapter_modules(model):
        if isinstance(carrier, LoraLinear):
            names.append(name)
        elif isinstance(carrier, LoraExperts):
            names += [f"{name}.{key}" for key in carrier.adapted]
    return names


def check_tokens_occur(tokens: tuple[int, ...], rows: TokenDataset) -> None:
    """Passes when every token whose row is to learn is in the rows.

    Raises:
        TargetError: some are not, so they would stay as they are.
    """
    missing = set(tokens)
    for row in range(len(rows)):
        if not missing:
            return
        missing -= set(np.intersect1d(rows.ids(row), list(missing)).tolist())
    if missing:
        raise TargetError(
            f"adapter.trainable_tokens: {sorted(missing)} occur in none of the {len(rows)} training rows, so their rows"
            " would not learn; leave them out"
        )


def check_vocabulary(model: nn.Module, rows: TokenDataset) -> None:
    """Passes when every token of the rows has a row in the base's embedding.

    Raises:
        BaseModelError: the tokenizer gave larger ids.
    """
    num_rows = num_tokens(model)
    if rows.counts.largest_id >= num_rows:
        raise BaseModelError(
            f"the tokenizer gave the id {rows.counts.largest_id}, the base's embedding has {num_rows} rows;"
            " they do not belong together"
        )
