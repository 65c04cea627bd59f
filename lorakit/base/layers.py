"""The repeated layers of a model: what engines gather, or have in memory, one at a time."""

from collections.abc import Iterator

from torch import nn


def repeated_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of every list of more than one that is not itself within a layer."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1 and not _inside_layer(model, module):
            yield from module


def gather_groups(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that are gathered one at a time: repeated layers, and an embedding that is not the head's too."""
    yield from repeated_layers(model)
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    uses = sum(p is embedding.weight for m in model.modules() for p in m._parameters.values())
    if uses == 1:
        yield embedding


def _inside_layer(model: nn.Module, inner: nn.ModuleList) -> bool:
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and m is not inner and len(m) > 1]
    return any(inner in layer.modules() for outer in lists for layer in outer)
