"""Layers compiled by torch.compile, each on its own and for any number of tokens, so that alike ones share the code."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from torch import nn

from lorakit.base.layers import repeated_layers
from lorakit.errors import RunError


@final
class CompiledLayers:
    """A model's repeated layers, compiled when they are first called.

    ``num_graphs``: pieces that were compiled so far; ``last_step``: the step in which the last of them was.

    Raises:
        RunError: the model has no repeated layers.
    """

    def __init__(self, model: nn.Module) -> None:
        import torch._dynamo.config

        layers = list(repeated_layers(model))
        if not layers:
            raise RunError(f"train.compile: {type(model).__name__} has no repeated layers to compile; leave it out")
        torch._dynamo.config.fail_on_recompile_limit_hit = True  # rather than going on uncompiled, without a word
        for layer in layers:
            layer.compile(dynamic=True)
        self._before = _count()
        self.num_graphs = self.last_step = 0

    @contextmanager
    def raising_run_errors(self) -> Iterator[None]:
        """What torch's compiler cannot do, in words: RunError."""
        from torch._dynamo.exc import TorchDynamoException

        try:
            yield
        except TorchDynamoException as problem:
            said = " ".join(str(problem).split())[:300]
            raise RunError(
                f"train.compile: torch cannot compile this model's layers; leave it out. It says: {said}"
            ) from None

    def record_step(self, step: int) -> None:
        """Note what a step has compiled."""
        found = _count() - self._before
        if found != self.num_graphs:
            self.num_graphs, self.last_step = found, step

    def stats(self) -> dict[str, int]:
        """Both numbers, for a run's record."""
        return {"graphs": self.num_graphs, "last_step": self.last_step}


def _count() -> int:
    import torch._dynamo.utils

    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
