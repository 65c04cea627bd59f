"""Bytes that one micro-batch allocates, from forward and backward of the model on the meta device.

Meta tensors have shapes and no memory, so sizes are exact for every architecture and no weight is read. Counted are
tensors that exist at the same time: activations, gradients of activations, logits. Parameters and the adapter's
gradients are not counted. Equal layers run once or twice and are multiplied, because memory is linear in their number.
Where ranks share each weight, the model runs with one rank's parts, and nothing is sent: shapes need no sums.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from lorakit.base.layers import checkpoint_layers
from lorakit.data.batch import IGNORE_INDEX, Batch
from lorakit.errors import BaseModelError
from lorakit.objectives.cross_entropy import LossModel, token_scores
from lorakit.objectives.pairs import build_objective
from lorakit.ops.packed_attention import enable_packed_attention
from lorakit.parallel.group import Group
from lorakit.parallel.tensor.cut import TensorShards
from lorakit.planning.memory_counter import META, FlashAttentionMode, MemoryCounter, MicroBatch
from lorakit.planning.model_shapes import shapes_of
from lorakit.planning.skeleton import adapted_skeleton
from lorakit.recipe import Recipe


@dataclass(frozen=True)
class LiveBytes:
    """Bytes saved for backward, and the most allocated above them in each phase of a micro-batch."""

    saved: float
    head: float  # During output head and loss, forward and backward.
    layer: float  # At any other time.


@final
class TracedModel:
    """An adapted base on meta: the shapes of its tensors, and the bytes that a micro-batch allocates.

    checkpointing: layers recompute their activations in backward. device_type: of the planned machine, whose logits
    come in chunks of another size. tensor: ranks that share each weight, of which the model gets one's parts, or
    RunError is raised.
    """

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        dtype: torch.dtype,
        *,
        checkpointing: bool = False,
        device_type: str = "cpu",
        tensor: int = 1,
    ) -> None:
        skeleton = adapted_skeleton(folder, recipe, dtype)
        self.facts = skeleton.facts
        self.model = model = skeleton.model.train()
        TensorShards(model, Group(0, tensor))  # leaves the shapes of one rank's parts
        self.shapes = shapes_of(model)  # Of one rank's parts of the weights.
        if recipe.base.quantize == "none":  # then quantised layers come from quantised files, read as they are
            self.shapes = replace(self.shapes, quantizing_bytes=0)
        self._device_type = device_type
        objective = build_objective(recipe.objective.name, recipe.objective.settings)
        self._loss_model = LossModel(model, objective, device_type=device_type)
        self._loss_model.packed_attention = enable_packed_attention(model)
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        # that with most parameters is the decoder's
        self._module_list = max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()))
        self._layers = list(self._module_list)
        self._config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
        self._types = list(getattr(self._config, "layer_types", None) or [])
        self._kinds = _layer_kinds(self._layers, self._types)
        if checkpointing:
            # a mode of its own, because recomputation runs inside `Tensor.backward`: a function mode intercepts that
            # call, and torch disables the mode during the interception
            checkpoint_layers(model, context_fn=lambda: (nullcontext(), FlashAttentionMode(device_type)))
        self.count = cache(self._count)

    def _count(self, batch: MicroBatch, *, backward: bool = True) -> LiveBytes:
        """Count the bytes of forward and backward; backward False: of a forward without gradients.

        One layer of each kind is counted, then each kind's second layer is added as often as the kind has more layers.
        """
        count = partial(_count, self._loss_model, batch, self._device_type, backward=backward)
        firsts = [members[0] for members in self._kinds.values()]
        total = one_each = self._with_layers(firsts, count)
        for members in self._kinds.values():
            if len(members) > 1:
                added = self._with_layers(sorted([*firsts, members[1]]), count) - one_each
                total = total + (len(members) - 1) * added
        saved, head, layer = total.tolist()
        return LiveBytes(saved, max(0.0, head), max(0.0, layer))

    def _with_layers(self, indices: list[int], count: Callable[[], np.ndarray]) -> np.ndarray:
        """Count with these layers alone in the model, then restore all layers."""
        self._set_layers(indices)
        try:
            return count()
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as problem:
            why = f"cannot be run without weights, so its memory is not known ({str(problem).splitlines()[0]})"
            raise BaseModelError(f"{type(self.model).__name__} {why}") from problem
        finally:
            self._set_layers(range(len(self._layers)))

    def _set_layers(self, indices: Iterable[int]) -> None:
        del self._module_list[:]
        self._module_list.extend(self._layers[index] for index in indices)
        if self._types:
            self._config.layer_types = [self._types[index] for index in indices]


def _layer_kinds(layers: Iterable[nn.Module], types: Sequence[str]) -> Mapping[Any, list[int]]:
    """Group layer indices by tensors, attention, and whether a layer before trains, so that inputs need gradients."""
    kinds: dict[Any, list[int]] = {}
    input_needs_gradient = False
    for index, layer in enumerate(layers):
        tensors = tuple((name, p.shape, p.requires_grad) for name, p in layer.named_parameters())
        attention = types[index] if types else None
        kinds.setdefault((type(layer), tensors, attention, input_needs_gradient), []).append(index)
        input_needs_gradient = input_needs_gradient or any(p.requires_grad for p in layer.parameters())
    return kinds


def _count(loss_model: LossModel, batch: MicroBatch, device_type: str, *, backward: bool) -> np.ndarray:
    """Return the values of `LiveBytes`, (3,) float64."""
    if batch.packed and loss_model.packed_attention:  # which needs a mask only for rows longer than a sliding window
        config: Any = loss_model.model.config
        window = getattr(config.get_text_config(), "sliding_window", None)
        batch = replace(batch, masked=window is not None and max(batch.row_lengths) > window)
    counter = MemoryCounter(batch, loss_model.model)
    with counter, FlashAttentionMode(device_type), _mark_head_phase(loss_model, counter):
        if not backward:
            with torch.no_grad():
                token_scores(loss_model, _meta_batch(batch))
            return np.array([0.0, max(counter.peak.values()), 0.0])
        scores = token_scores(loss_model, _meta_batch(batch))
        (scores.losses if scores.states is None else scores.states).sum().backward()
    return np.array([counter.saved, *(counter.peak[phase] - counter.saved for phase in ("head", "layer"))], float)


def _meta_batch(batch: MicroBatch) -> Batch:
    ids = torch.zeros(batch.lines, batch.width, dtype=torch.long, device=META)
    labels = torch.full_like(ids, IGNORE_INDEX)
    mask = None if batch.packed else torch.ones_like(ids)
    positions = torch.zeros_like(ids)
    rows = (0,), batch.num_tokens, (batch.num_labels,), torch.ones(1), batch.row_lengths
    return Batch(ids, labels, positions, mask, *rows)


@contextmanager
def _mark_head_phase(loss_model: LossModel, counter: "MemoryCounter") -> Iterator[None]:
    """Set the counter's phase to "head" from the head's forward to the end of the head's backward, if there is one."""
    head: nn.Module | None = loss_model.head or loss_model.model.get_output_embeddings()  # type: ignore[operator]
    if head is None:
        yield
        return

    def begin(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        counter.saved = counter.alive
        counter.phase = "head"
        counter.peak["head"] = max(counter.peak["head"], counter.alive)
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda gradient: setattr(counter, "phase", "layer"))

    with head.register_forward_pre_hook(begin):
        yield
