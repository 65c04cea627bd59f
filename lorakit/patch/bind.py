"""Bind a patch to a base: each of its parts, with the parameter that it changes. The only such walk.

Training, serving and merging all go through `bind`, so that what one of them reads, the others do.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lorakit.lora.layer_kinds import LayerKind
from lorakit.patch.fit import BaseShapes
from lorakit.patch.patch import Patch, PatchLayer, TokenRows


@dataclass(frozen=True)
class FullTensor:
    """A tensor that replaces a parameter. It is read when it is used."""

    tensors: Mapping[str, Tensor] = field(repr=False)
    parameter: str

    @property
    def tensor(self) -> Tensor:
        return self.tensors[self.parameter]


@dataclass(frozen=True)
class Binding:
    """One part of a patch, and the parameter of the base that it changes."""

    name: str
    """of the part in the patch: a module; the parameter of experts or of a full tensor"""
    module: str
    key: str
    """the parameter's name in its module"""
    kind: LayerKind | None
    """of the layer whose weight the parameter is; None for other parameters, experts among them"""
    part: PatchLayer | TokenRows | FullTensor

    @property
    def parameter(self) -> str:
        return f"{self.module}.{self.key}"


def bind(patch: Patch, shapes: BaseShapes) -> Iterator[Binding]:
    """Yield each part of a patch that fits, exactly once: updates, then full tensors, then token rows."""
    for name, layer in patch.layers.items():
        if layer.num_experts:
            module, _, key = name.rpartition(".")
            yield Binding(name, module, key, None, layer)
        else:
            yield Binding(name, name, "weight", _kind(shapes, name), layer)
    for parameter in patch.full_shapes:
        module, _, key = parameter.rpartition(".")
        yield Binding(parameter, module, key, _kind(shapes, module), FullTensor(patch.full_tensors, parameter))
    for name, rows in patch.token_rows.items():
        yield Binding(name, name, "weight", _kind(shapes, name), rows)


def without_copies(patch: Patch, read: Callable[[str], Tensor], trained: Collection[str] = ()) -> Patch:
    """Return the patch without full tensors that are the base's own, which PEFT saves beside adapted embeddings.

    read: parameter -> the base's values, on the CPU. trained: parameters that stay, equal or not.
    """

    def is_copy(name: str) -> bool:
        value = patch.full_tensors[name]
        own = read(name)
        return torch.equal(own.to(value.dtype), value) or torch.equal(value.to(own.dtype), own)

    names = [name for name in patch.full_shapes if name in trained or not is_copy(name)]
    return replace(
        patch,
        full_tensors={name: patch.full_tensors[name] for name in names},
        full_shapes={name: patch.full_shapes[name] for name in names},
    )


def _kind(shapes: BaseShapes, module: str) -> LayerKind | None:
    return shapes.layers[module][0] if module in shapes.layers else None
