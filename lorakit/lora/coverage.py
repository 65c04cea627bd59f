"""Count which share of a base's matrix parameters an adapter changes."""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from torch import nn

from lorakit.files.text import count_of
from lorakit.lora.layer_kinds import QuantizedExperts, expert_parameters, is_linear_like, kind_of
from lorakit.lora.spec import ALL_LINEAR, AdapterSpec
from lorakit.lora.targets import embedding_and_head

LOW_COVERAGE: Final = 0.5  # share below which `all-linear` gets a note, because most of the base is then in experts


@dataclass(frozen=True)
class LayerKindCoverage:
    """The matrices whose names end in `name`, such as ``q_proj``: linear layers, or 3-D parameters of experts."""

    name: str
    example: str  # full name of the first
    adapted: int  # number of matrices with an adapter, of `count`
    count: int
    parameters: int
    adapted_parameters: int  # of the matrices with an adapter


@dataclass(frozen=True)
class Coverage:
    """The matrices that a base multiplies by, grouped by the last part of their names. An unadapted head has size 0."""

    kinds: tuple[LayerKindCoverage, ...]
    experts: bool  # True if some are 3-D parameters of experts

    @property
    def share(self) -> float:
        """Return the share of all matrix parameters that are in adapted matrices."""
        return sum(kind.adapted_parameters for kind in self.kinds) / max(1, sum(kind.parameters for kind in self.kinds))


def adapter_notes(coverage: Coverage, spec: AdapterSpec, left_out: Mapping[str, str]) -> tuple[str, ...]:
    """Return remarks for the user. left_out: layers that `all-linear` would adapt, and why it does not."""
    notes = []
    if spec.targets == ALL_LINEAR and left_out:
        first = {reason: name for name, reason in list(left_out.items())[::-1]}
        each = [f"{number} such as {first[reason]} ({reason})" for reason, number in Counter(left_out.values()).items()]
        notes.append(f"all-linear leaves out {count_of(len(left_out), 'layer')}: {', '.join(each)}")
    if spec.targets == ALL_LINEAR and coverage.share < LOW_COVERAGE:
        largest = sorted(coverage.kinds, key=lambda kind: kind.adapted_parameters - kind.parameters)[:3]
        names = ", ".join(f"{kind.name} ({kind.parameters:,})" for kind in largest if not kind.adapted)
        unused = coverage.experts and not spec.target_parameters
        experts = "; target_parameters: all-experts reaches experts" if unused else ""
        share = f"{coverage.share:.0%} of the weights used in matrix products"
        notes.append(f"all-linear reaches {share}; the rest is in {names}{experts}")
    if spec.new_tokens:
        notes.append("new tokens: " + ", ".join(f"{text} ({token})" for text, token in spec.new_tokens.items()))
    return tuple(notes)


def coverage_of(model: nn.Module, adapted: Collection[str]) -> Coverage:
    """Return the coverage of a model without an adapter, if the matrices named in `adapted` get one."""
    sizes_by_kind: dict[str, dict[str, int]] = {}
    _, head = embedding_and_head(model)
    sizes = {
        name: math.prod(kind.sizes(module))
        for name, module in model.named_modules()
        if is_linear_like(module) and (kind := kind_of(module)) is not None
    }
    sizes |= {name: math.prod(shape) for name, (_, shape) in expert_parameters(model)}
    sizes |= {name: one.num_values for name, one in model.named_modules() if isinstance(one, QuantizedExperts)}
    for name, size in sizes.items():
        size = 0 if name == head and name not in adapted else size
        sizes_by_kind.setdefault(name.rpartition(".")[2], {})[name] = size
    kinds = []
    for suffix, own in sizes_by_kind.items():
        of_adapted = [size for name, size in own.items() if name in adapted]
        counts = len(of_adapted), len(own), sum(own.values()), sum(of_adapted)
        kinds.append(LayerKindCoverage(suffix, next(iter(own)), *counts))
    return Coverage(tuple(kinds), any(expert_parameters(model)))
