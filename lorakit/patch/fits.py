"""Does a patch fit a base: is every tensor of it bound to something of the same shape?"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from lorakit.errors import PatchError, nearest
from lorakit.lora.kinds import EMBEDDING, Kind, adaptable_layers
from lorakit.lora.targets import embedding_and_head, tied_head
from lorakit.patch.patch import Patch


@dataclass(frozen=True)
class Shapes:
    """What a patch can bind to in a base; taken from the model itself or from its skeleton."""

    layers: Mapping[str, tuple[Kind, tuple[int, int]]]
    """every layer an update can sit on: (kind, (out, in))"""
    parameters: Mapping[str, tuple[int, ...]]
    tied: tuple[str, str] | None
    """output head and input embedding, when they share their weight"""
    embedding: str | None
    head: str | None

    @classmethod
    def of(cls, model: nn.Module) -> "Shapes":
        """Works on the meta device."""
        parameters = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
        return cls(adaptable_layers(model), parameters, tied_head(model), *embedding_and_head(model))


def problems(patch: Patch, base: Shapes) -> Iterator[tuple[str, str]]:
    """(module or parameter, what is wrong with it) for everything of the patch that does not bind."""
    yield from _update_problems(patch, base)
    for name, shape in patch.whole_shapes.items():
        if name not in base.parameters:
            yield name, f"{name} is not a parameter of this base.{nearest(name, base.parameters)}"
        elif base.parameters[name] != shape:
            yield name, f"{name} is {base.parameters[name]} in the base, {shape} in the patch"
    for saved in patch.config.modules_to_save:
        for name in base.parameters:
            if name not in patch.whole_shapes and any(module.endswith(saved) for module in _parents(name)):
                yield name, f"{name} belongs to modules_to_save ({saved!r}), and the patch holds no tensor for it"


def _update_problems(patch: Patch, base: Shapes) -> Iterator[tuple[str, str]]:
    for name, layer in patch.layers.items():
        if name not in base.layers:
            yield name, f"{name} is not a layer of this base that can be adapted.{nearest(name, base.layers)}"
            continue
        kind, sizes = base.layers[name]
        if (kind is EMBEDDING) != layer.embedding:
            yield name, f"{name} is {'an' if kind is EMBEDDING else 'no'} embedding in the base, not so in the patch"
        elif sizes != layer.sizes:
            yield name, f"{name} is {sizes} (out, in) in the base, {layer.sizes} in the patch"


def _parents(parameter: str) -> list[str]:
    pieces = parameter.split(".")[:-1]
    return [".".join(pieces[:count]) for count in range(1, len(pieces) + 1)]


def check_fits(patch: Patch, base: Shapes, name: object) -> None:
    """Passes when every tensor of the patch has its place in the base, of the same shape.

    Raises:
        PatchError: names what is missing or differs.
    """
    found = [text for _, text in problems(patch, base)]
    if not found:
        return
    more = [f"... and {len(found) - 3} more"] if len(found) > 3 else []
    shown = "\n  ".join([*found[:3], *more, f"it was made for {patch.made_for}"])
    count = len(patch.layers) + len(patch.whole_shapes)
    raise PatchError(f"{patch.folder}: does not fit {name}: {len(found)} of {count} places\n  {shown}")
