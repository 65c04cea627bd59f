"""Replace the parts of a model that have a fused form, and report which were replaced and which were not.

A part is replaced by giving its module a subclass of its own class (`FusedLlamaMLP`), which `print(model)` shows. Its
parameters and its other attributes stay as they are. Outputs keep their bits; unknown code stays as written.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Final

from torch import nn

from lorakit.ops import gated_mlp, rms_norm


@dataclass(frozen=True)
class PartKind:
    """A kind of part: how to recognise one, and its fused forward."""

    resembles: Callable[[nn.Module], bool]
    """True if a module is such a part by its looks, whatever its code"""
    has_known_code: Callable[[nn.Module], bool]
    """True if the fused forward computes the same bits as the module's own"""
    fused_forward: Callable[[type[nn.Module]], Callable[..., Any]]
    """class -> the forward that replaces its own"""


PART_KINDS: Final[Mapping[str, PartKind]] = {
    "mlp": PartKind(gated_mlp.resembles_gated_mlp, gated_mlp.is_gated_mlp, gated_mlp.fused_mlp_forward),
    "rms_norm": PartKind(rms_norm.resembles_rms_norm, rms_norm.is_rms_norm, rms_norm.fused_norm_forward),
}


@dataclass(frozen=True)
class FusedParts:
    """How many parts of one kind a model has, and how many of them run fused. unknown: classes of the others."""

    fused: int
    total: int
    unknown: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.total == 0:
            return "none"
        counts = f"{self.fused}/{self.total}"
        return f"{counts} (the code of {', '.join(self.unknown)} is not known)" if self.unknown else counts


@dataclass(frozen=True)
class FuseReport:
    """What `fuse_model` replaced and what it could not, by kind of part."""

    parts: Mapping[str, FusedParts]

    def __str__(self) -> str:
        """Return such as `mlp 0/32 (the code of Phi3MLP is not known), rms_norm 65/65`."""
        return ", ".join(f"{kind} {part}" for kind, part in self.parts.items())

    def facts(self) -> dict[str, Any]:
        """Return the report for run.json."""
        return {kind: asdict(part) for kind, part in self.parts.items()}


def fuse_model(model: nn.Module) -> FuseReport:
    """Replace every part of known code by its fused form, in place."""
    fused = dict.fromkeys(PART_KINDS, 0)
    unknown: dict[str, list[str]] = {kind: [] for kind in PART_KINDS}
    for module in list(model.modules()):
        for name, kind in PART_KINDS.items():
            if is_fused(module, name):
                fused[name] += 1
            elif kind.has_known_code(module):
                cls: Any = type(module)
                module.__class__ = fused_class(cls, name)
                fused[name] += 1
            elif kind.resembles(module):
                unknown[name].append(type(module).__name__)
    return FuseReport({
        name: FusedParts(fused[name], fused[name] + len(unknown[name]), tuple(dict.fromkeys(unknown[name])))
        for name in PART_KINDS
    })  # fmt: skip


def is_fused(module: nn.Module, kind: str) -> bool:
    """True if a module's class was made by `fused_class` for this kind of part."""
    return getattr(type(module), "fused_kind", None) == kind


@cache
def fused_class(cls: type[Any], kind: str) -> type[Any]:
    """Return a subclass with the fused forward; its instances differ from those of `cls` in nothing else."""
    attributes = {"forward": PART_KINDS[kind].fused_forward(cls), "fused_kind": kind, "__module__": cls.__module__}
    return type(f"Fused{cls.__name__}", (cls,), attributes)
