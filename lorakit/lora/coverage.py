"""Which share of a base's products an adapter reaches."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from torch import nn

from lorakit.lora.experts import expert_parameters
from lorakit.lora.layer_kinds import is_linear_like, kind_of
from lorakit.lora.spec import ALL_LINEAR, AdapterSpec
from lorakit.lora.targets import embedding_and_head

LOW_COVERAGE: Final = 0.5


@dataclass(frozen=True)
class LayerKindCoverage:
    """All matrices of one name: linear layers, or 3-D parameters of experts."""

    name: str
    example: str
    """the whole name of the first"""
    adapted: int
    count: int
    parameters: int
    adapted_parameters: int
    """parameters of those that are adapted"""


@dataclass(frozen=True)
class Coverage:
    """The matrices of a base that take part in products, by the last part of their names. Of an output head that is
    not adapted the parameters are not counted: ``all-linear`` leaves it out by its meaning.
    """

    kinds: tuple[LayerKindCoverage, ...]
    experts: bool
    """whether some are 3-D parameters of experts"""

    @property
    def share(self) -> float:
        """Of the parameters of all of them, what the adapted ones hold."""
        return sum(kind.adapted_parameters for kind in self.kinds) / max(1, sum(kind.parameters for kind in self.kinds))

    def note(self, spec: AdapterSpec) -> str | None:
        """What to say when ``all-linear`` reaches less than half; else None."""
        if spec.targets != ALL_LINEAR or self.share >= LOW_COVERAGE:
            return None
        left = sorted(self.kinds, key=lambda kind: kind.adapted_parameters - kind.parameters)[:3]
        names = ", ".join(
            f"{kind.name} ({kind.parameters - kind.adapted_parameters:,})" for kind in left if not kind.adapted
        )
        unused = self.experts and not spec.target_parameters
        experts = "; target_parameters: all-experts reaches experts" if unused else ""
        return f"all-linear reaches {self.share:.0%} of the parameters in products; the rest is in {names}{experts}"


def covering(model: nn.Module, adapted: Collection[str]) -> Coverage:
    """The matrices of a model without an adapter, and which of them ``adapted`` names."""
    found: dict[str, dict[str, int]] = {}
    _, head = embedding_and_head(model)
    for name, size in _matrices(model):
        found.setdefault(name.rpartition(".")[2], {})[name] = 0 if name == head and name not in adapted else size
    kinds = []
    for kind, sizes in found.items():
        held = [name for name in sizes if name in adapted]
        adapted_parameters = sum(sizes[name] for name in held)
        kinds.append(
            LayerKindCoverage(kind, next(iter(sizes)), len(held), len(sizes), sum(sizes.values()), adapted_parameters)
        )
    return Coverage(tuple(kinds), any(expert_parameters(model)))


def _matrices(model: nn.Module) -> Iterable[tuple[str, int]]:
    """(name, parameters) of every matrix that rows are multiplied with."""
    for name, module in model.named_modules():
        if is_linear_like(module) and (kind := kind_of(module)) is not None:
            out_features, in_features = kind.sizes(module)
            yield name, out_features * in_features
    for name, module, key in expert_parameters(model):
        yield f"{name}.{key}", module.get_parameter(key).numel()
