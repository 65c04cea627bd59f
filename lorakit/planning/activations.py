"""What one micro-batch allocates: forward and backward of the model itself, on tensors without memory.

Every operation runs on the meta device, so sizes are exact whatever the architecture, no weight is read and no
product computed. Counted is what is alive at once: activations, gradients in flight, logits; not parameters and not
the adapter's gradients. Layers that are alike are run once or twice and multiplied: memory is linear in their number.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from lorakit.base.layers import CHECKPOINTS, checkpoint_layers
from lorakit.data.batch import IGNORE_INDEX, Batch
from lorakit.errors import BaseModelError
from lorakit.objectives.cross_entropy import LossModel, loss_sum
from lorakit.ops.packed_attention import enable_packed_attention
from lorakit.planning.memory_counter import META, FlashAttentionMode, MemoryCounter, MicroBatch
from lorakit.planning.model_shapes import adapted_skeleton, repeated_layers
from lorakit.recipe import AdapterSection, BaseSection


@dataclass(frozen=True)
class LiveBytes:
    """Bytes alive at once: what forward keeps for backward, and the most above that, by what is computed."""

    saved: float
    head: float
    """While output head and loss are computed, forward and backward."""
    layer: float
    """At any other time."""

    def plus(self, other: "LiveBytes", times: float) -> "LiveBytes":
        return LiveBytes(
            self.saved + times * other.saved, self.head + times * other.head, self.layer + times * other.layer
        )


@final
class ActivationTracer:
    """Runs micro-batches through the model of a folder."""

    def __init__(
        self, folder: Path, base: BaseSection, adapter: AdapterSection, dtype: torch.dtype, *, checkpointing: bool
    ) -> None:
        self._model = adapted_skeleton(folder, base, adapter, dtype).train()
        self._called = LossModel(self._model)
        self._called.by_row = enable_packed_attention(self._model)
        self._parent, self._name, self._layers = repeated_layers(self._model)
        config: Any = self._model.config
        self._config = config.get_text_config()
        self._types = list(getattr(self._config, "layer_types", None) or [])
        self._kinds = _kinds(self._layers, self._types)
        if checkpointing:
            checkpoint_layers(self._model)
            for module in self._model.modules():
                if getattr(module, CHECKPOINTS, None) is not None:
                    setattr(module, CHECKPOINTS, partial(getattr(module, CHECKPOINTS), context_fn=_also_recomputing))

    def training(self, batch: MicroBatch) -> LiveBytes:
        """Of forward and backward."""
        return self._multiplied(lambda: _training(self._called, batch))

    def evaluating(self, batch: MicroBatch) -> LiveBytes:
        """Of a forward that keeps nothing."""
        return self._multiplied(lambda: _evaluating(self._called, batch))

    def _multiplied(self, run: Callable[[], LiveBytes]) -> LiveBytes:
        """For one layer of each kind, and for each kind what one more adds."""
        firsts = [members[0] for members in self._kinds.values()]
        total = one_each = self._with(firsts, run)
        for members in self._kinds.values():
            if len(members) > 1:
                more = self._with(sorted([*firsts, members[1]]), run).plus(one_each, -1.0)
                total = total.plus(more, len(members) - 1)
        return LiveBytes(total.saved, max(0.0, total.head), max(0.0, total.layer))

    def _with(self, chosen: list[int], run: Callable[[], LiveBytes]) -> LiveBytes:
        setattr(self._parent, self._name, nn.ModuleList(self._layers[index] for index in chosen))
        if self._types:
            self._config.layer_types = [self._types[index] for index in chosen]
        try:
            return run()
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as problem:
            raise BaseModelError(
                f"{type(self._model).__name__} cannot be run without weights, so its memory is not known"
                f" ({type(problem).__name__}: {str(problem).splitlines()[0]})"
            ) from problem
        finally:
            setattr(self._parent, self._name, self._layers)
            if self._types:
                self._config.layer_types = self._types


def _kinds(layers: nn.ModuleList, types: Sequence[str]) -> Mapping[Any, list[int]]:
    """Layers by what decides their memory: tensors, attention, and whether a gradient goes on to what is below."""
    found: dict[Any, list[int]] = {}
    reached = False
    for index, layer in enumerate(layers):
        tensors = tuple((name, p.shape, p.requires_grad) for name, p in layer.named_parameters())
        attention = types[index] if types else None
        found.setdefault((type(layer), tensors, attention, reached), []).append(index)
        reached = reached or any(p.requires_grad for p in layer.parameters())
    return found


def _training(called: LossModel, batch: MicroBatch) -> LiveBytes:
    count = MemoryCounter(_seen(called, batch), called.model)
    with count, FlashAttentionMode(), _noting_the_head(called, count):
        loss_sum(called, _made(batch)).backward()
    return LiveBytes(count.saved, count.peak["head"] - count.saved, count.peak["layer"] - count.saved)


def _evaluating(called: LossModel, batch: MicroBatch) -> LiveBytes:
    count = MemoryCounter(_seen(called, batch), called.model)
    with count, FlashAttentionMode(), torch.no_grad():
        loss_sum(called, _made(batch))
    return LiveBytes(0.0, max(count.peak.values()), 0.0)


def _seen(called: LossModel, batch: MicroBatch) -> MicroBatch:
    """Rows that attend by themselves need a mask only where they are longer than a window."""
    if not (batch.packed and called.by_row):
        return batch
    config: Any = called.model.config
    window = getattr(config.get_text_config(), "sliding_window", None)
    return replace(batch, masked=window is not None and max(batch.row_lengths) > window)


def _made(batch: MicroBatch) -> Batch:
    ids = torch.zeros(batch.lines, batch.width, dtype=torch.long, device=META)
    labels = torch.full_like(ids, IGNORE_INDEX)
    mask = None if batch.packed else torch.ones_like(ids)
    places = torch.zeros_like(ids)
    return Batch(ids, labels, places, mask, (0,), batch.num_tokens, batch.num_labels, batch.row_lengths)


@contextmanager
def _noting_the_head(called: LossModel, count: MemoryCounter) -> Iterator[None]:
    """Tell ``count`` when the head begins, and when backward has left it."""
    head: nn.Module = called.head or called.model.get_output_embeddings()  # type: ignore[operator]

    def begins(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        count.saved, count.phase = count.alive, "head"
        count.peak["head"] = max(count.peak["head"], count.alive)
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda gradient: setattr(count, "phase", "layer"))

    handle = head.register_forward_pre_hook(begins)
    try:
        yield
    finally:
        handle.remove()


def _also_recomputing() -> tuple[Any, Any]:
    """Contexts of a layer's forward and of its recomputation, in which the modes around it are not seen."""
    return nullcontext(), FlashAttentionMode()
