"""The repeated layers of a model: what engines gather, or have in memory, one at a time."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn

from lorakit.errors import RunError


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


CHECKPOINTS: Final = "_gradient_checkpointing_func"  # where transformers' layers keep the function that recomputes them


def checkpoint_layers(model: nn.Module, *, on_host: bool = False) -> None:
    """Keep only layer inputs in forward, in host memory if asked, and compute the rest again in backward.

    Raises:
        RunError: no layer of this model can do it.
    """
    settings = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)  # type: ignore[operator]
    else:  # transformers before 5.2x
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)  # type: ignore[operator]
    layers = [
        m for m in model.modules() if getattr(m, CHECKPOINTS, None) and getattr(m, "gradient_checkpointing", False)
    ]
    if not layers:
        raise RunError(f"train.activation_checkpointing: {type(model).__name__} cannot recompute its layers; use none")
    for layer in layers if on_host else ():
        setattr(layer, CHECKPOINTS, _kept_on_host(getattr(layer, CHECKPOINTS)))


def _kept_on_host(recompute: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with what it saves (a layer's input) copied to host memory until backward needs it."""

    def layer(*inputs: Any, **settings: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return recompute(*inputs, **settings)

    return layer
