"""Compile a model's repeated layers with torch.compile, each on its own, because equal layers then share one graph.

The graph accepts any number of tokens, so a step of another length does not recompile.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from torch import nn

from lorakit.base.layers import repeated_layers
from lorakit.errors import RunError
from lorakit.training._internals import compiler_errors, fail_on_recompile_limit, num_compiled_graphs


@final
class CompiledLayers:
    """A model's repeated layers, each compiled at its first call.

    num_graphs: graphs compiled so far. last_step: the step that compiled the newest of them.
    Raises RunError: the model has no repeated layers.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = list(repeated_layers(model))
        if not layers:
            raise RunError(f"train.compile: {type(model).__name__} has no repeated layers to compile; leave it out")
        fail_on_recompile_limit()
        for layer in layers:
            layer.compile(dynamic=True)
        self._graphs_before = num_compiled_graphs()  # of earlier runs in this process
        self.num_graphs = self.last_step = 0

    @contextmanager
    def raising_run_errors(self) -> Iterator[None]:
        """Turn errors of torch's compiler inside the block into a RunError with their first words."""
        try:
            yield
        except compiler_errors() as problem:
            text = " ".join(str(problem).split())[:300]
            raise RunError(
                f"train.compile: torch cannot compile this model's layers; leave it out. It says: {text}"
            ) from None

    def record_step(self, step: int) -> None:
        num_graphs = num_compiled_graphs() - self._graphs_before
        if num_graphs != self.num_graphs:
            self.num_graphs = num_graphs
            self.last_step = step

    def stats(self) -> dict[str, int]:
        return {"graphs": self.num_graphs, "last_step": self.last_step}
