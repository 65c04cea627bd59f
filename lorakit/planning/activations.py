"""Bytes that one micro-batch allocates, from forward and backward of the model on the meta device.

Meta tensors have shapes and no memory, so sizes are exact for every architecture and no weight is read. Counted are
tensors that exist at the same time: activations, gradients of activations, logits. Parameters and the adapter's
gradients are not counted. Equal layers run once or twice and are multiplied, because memory is linear in their number.
Where ranks share each weight, the model runs with one rank's parts, and nothing is sent: shapes need no sums.
On the meta device tensors have no values and kernels do not run, so both modes here supply what a real run would have:
results that depend on values, and the tensors that flash attention saves.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lorakit.base.layers import checkpoint_layers
from lorakit.data.batch import IGNORE_INDEX, Batch
from lorakit.errors import BaseModelError
from lorakit.objectives.cross_entropy import LossModel, token_scores
from lorakit.objectives.pairs import build_objective
from lorakit.ops._internals import storage_id
from lorakit.ops.packed_attention import enable_packed_attention
from lorakit.parallel.group import Group
from lorakit.parallel.tensor.axis import TensorShards
from lorakit.planning.skeleton import META, adapted_skeleton, shapes_of
from lorakit.recipe import Recipe

ATEN: Final = torch.ops.aten


@dataclass(frozen=True)
class MicroBatch:
    """The shape of one micro-batch: ``lines`` of ``width`` tokens with ``num_labels`` label tokens in all."""

    lines: int
    width: int
    num_labels: int
    packed: bool  # True for one line of several rows.
    masked: bool  # Whether attention needs a mask: several rows in a line, or padding.
    row_lengths: tuple[int, ...] = ()  # Tokens per row of a packed line.

    @property
    def num_tokens(self) -> int:
        return self.lines * self.width


@final
class MemoryCounter(TorchDispatchMode):
    """Counts the bytes of storages from allocation to release.

    Operations whose result depends on values get the result that a micro-batch of the given shape would give: its
    number of labels, attention masks that are dropped where possible, and experts with equal shares of the tokens.
    """

    def __init__(self, batch: MicroBatch, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._batch = batch
        config: Any = model.config
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        counts = (getattr(config.get_text_config(), name, None) for name in names)
        self._num_experts = int(next(filter(None, counts), 1))
        self._sizes: dict[int, int] = {}
        self.alive = 0
        self.saved = 0
        self.phase = "layer"
        self.peak: Counter[str] = Counter()
        self._all_results: set[int] = set()  # storages of the results of torch.all
        for parameter in model.parameters():
            self._sizes[storage_id(parameter)] = 0
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            if parameter.grad is not None:
                self._sizes[storage_id(parameter.grad)] = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if func is ATEN._local_scalar_dense.default:
            # transformers drops a mask if torch.all(mask) is true
            return storage_id(args[0]) in self._all_results and not self._batch.masked
        if packet is ATEN.nonzero:
            return torch.zeros(self._num_selected(args[0]), args[0].dim(), dtype=torch.long, device=META)
        if packet in (ATEN.index, ATEN.index_put, ATEN.index_put_, ATEN._index_put_impl_):
            args = (args[0], [index for given in args[1] for index in self._as_indices(given)], *args[2:])
        result = (_grouped_product if packet is ATEN._grouped_mm else func)(*args, **(kwargs or {}))
        if packet is ATEN.all:
            self._all_results.add(storage_id(result))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        if func.namespace != ATEN.name and getattr(args[0], "dtype", None) is torch.int8:
            # bitsandbytes dequantises int8 with two products, of which the first is a temporary of this size
            self.peak[self.phase] = max(self.peak[self.phase], self.alive + result.nbytes)
        return result

    def _as_indices(self, given: Tensor | None) -> list[Tensor | None]:
        """Replace a boolean mask by index tensors, because the number of True values is unknown on meta."""
        if given is None or given.dtype != torch.bool:
            return [given]
        return [torch.zeros(self._num_selected(given), dtype=torch.long, device=META)] * given.dim()

    def _num_selected(self, mask: Tensor) -> int:
        """Return the number of True values that a mask of this shape would have."""
        if mask.numel() == self._batch.num_tokens:
            return self._batch.num_labels
        return mask.numel() if mask.dim() == 1 else max(1, mask.numel() // self._num_experts)

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage_id(tensor)
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.alive += self._sizes[key]
        weakref.finalize(storage, self._remove, key)
        self.peak[self.phase] = max(self.peak[self.phase], self.alive)

    def _remove(self, key: int) -> None:
        self.alive -= self._sizes.pop(key, 0)
        self._all_results.discard(key)


@final
class FlashAttentionMode(TorchFunctionMode):
    """Computes attention as flash kernels do: saved are queries, keys, values, output and one number per row and head.

    Two kinds of attention run unchanged, because torch then saves all scores: with dropout, as in GPT-2, and on CPUs
    with values of another width than the queries, as in multi-head latent attention (DeepSeek).
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._on_gpu = device_type != "cpu"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        settings = kwargs or {}
        if func is not F.scaled_dot_product_attention or settings.get("dropout_p"):
            return func(*args, **settings)
        attended = _attention(self._on_gpu, *args, **settings)
        return func(*args, **settings) if attended is None else attended


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
        self._loss_model = LossModel(model, build_objective(recipe.objective.name, recipe.objective.settings))
        if self._loss_model.head is not None:
            self._loss_model.head.device_type = device_type
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


def _attention(
    on_gpu: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Return attention by a kernel that saves no scores; for values of any width, only GPUs have one."""
    if query.shape[-1] == value.shape[-1]:
        return ATEN._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=_as_floats(attn_mask, query), scale=scale
        )[0]
    if on_gpu:
        return ATEN._scaled_dot_product_efficient_attention(
            query, key, value, _as_floats(attn_mask, query), True, dropout_p, is_causal, scale=scale
        )[0]
    return None


def _as_floats(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return a mask in floats, to which torch converts a boolean mask in every call."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=query.dtype, device=META)
    return torch.where(mask, zero, zero)


def _grouped_product(x: Tensor, y: Tensor, offs: Tensor | None = None, **settings: Any) -> Tensor:
    """Return the result's shape of torch._grouped_mm, whose own meta function accepts bfloat16 only."""
    if x.dim() == y.dim() == 2:
        assert offs is not None
        return torch.empty(len(offs), x.shape[0], y.shape[1], dtype=x.dtype, device=META)
    return torch.empty(*x.shape[:-1], y.shape[-1], dtype=x.dtype, device=META)


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
    mask = None if batch.packed else torch.ones_like(ids)
    rows = (0,), batch.num_tokens, (batch.num_labels,), torch.ones(1), batch.row_lengths
    return Batch(ids, torch.full_like(ids, IGNORE_INDEX), torch.zeros_like(ids), mask, *rows)


@contextmanager
def _mark_head_phase(loss_model: LossModel, counter: MemoryCounter) -> Iterator[None]:
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
