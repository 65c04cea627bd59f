"""Bytes that one micro-batch allocates, from forward and backward of the model on the meta device.

Meta tensors have shapes and no memory, so sizes are exact for every architecture and no weight is read. Counted are
tensors that exist at the same time: activations, gradients of activations, logits. Parameters and the adapter's
gradients are not counted. Equal layers run once or twice and are multiplied, because memory is linear in their number.
Where ranks share each weight, the model runs with one rank's parts, and nothing is sent: shapes need no sums.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

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
from lorakit.ops._internals import storage_id
from lorakit.ops.packed_attention import enable_packed_attention
from lorakit.parallel.tensor import cut_on_meta
from lorakit.planning.model_shapes import adapted_skeleton, largest_layer_list
from lorakit.recipe import AdapterSection, BaseSection

ATEN: Final = torch.ops.aten
META: Final = torch.device("meta")


@dataclass(frozen=True)
class MicroBatch:
    """The shape of one micro-batch: ``lines`` of ``width`` tokens with ``num_labels`` label tokens in all."""

    lines: int
    width: int
    num_labels: int
    packed: bool
    """True for one line of several rows."""
    masked: bool
    """Whether attention needs a mask: several rows in a line, or padding."""
    row_lengths: tuple[int, ...] = ()
    """Tokens per row of a packed line."""

    @property
    def num_tokens(self) -> int:
        return self.lines * self.width


@dataclass(frozen=True)
class LiveBytes:
    """Bytes saved for backward, and the most allocated above them in each phase of a micro-batch."""

    saved: float
    head: float
    """During output head and loss, forward and backward."""
    layer: float
    """At any other time."""

    def plus(self, other: "LiveBytes", times: float) -> "LiveBytes":
        """Return self + times * other."""
        return LiveBytes(
            self.saved + times * other.saved, self.head + times * other.head, self.layer + times * other.layer
        )


def activations_of_part(full: LiveBytes, part: LiveBytes, num_ranks: int) -> LiveBytes:
    """Return the activations of a rank where ``num_ranks`` share each weight, and the tokens outside of the cut blocks.

    full, part: counted in the full model, and in the model with one rank's parts of the weights and all tokens. Weights
    or tokens cut every byte but those of the head, which reads the hidden states of all tokens.
    """
    return LiveBytes(full.saved / num_ranks, part.head, full.layer / num_ranks)


@final
class ActivationTracer:
    """Runs micro-batches on the meta device through the base of a folder with the adapter of a recipe.

    device_type: of the planned machine, whose logits come in chunks of another size. tensor: ranks that share each
    weight, of which the model has one's parts.

    Raises:
        RunError: so many ranks cannot share the weights.
    """

    def __init__(
        self,
        folder: Path,
        base: BaseSection,
        adapter: AdapterSection,
        dtype: torch.dtype,
        *,
        checkpointing: bool,
        device_type: str = "cpu",
        tensor: int = 1,
    ) -> None:
        self._model = adapted_skeleton(folder, base, adapter, dtype).train()
        if tensor > 1:
            cut_on_meta(self._model, tensor)
        self._loss_model = LossModel(self._model, device_type=device_type)
        self._loss_model.packed_attention = enable_packed_attention(self._model)
        self._parent, self._name, self._layers = largest_layer_list(self._model)
        config: Any = self._model.config
        self._config = config.get_text_config()
        self._types = list(getattr(self._config, "layer_types", None) or [])
        self._kinds = _layer_kinds(self._layers, self._types)
        if checkpointing:
            checkpoint_layers(self._model, context_fn=_recompute_contexts)

    def training(self, batch: MicroBatch) -> LiveBytes:
        """Count forward and backward."""
        return self._extrapolate(lambda: _measure_training_step(self._loss_model, batch))

    def evaluating(self, batch: MicroBatch) -> LiveBytes:
        """Count a forward without gradients."""
        return self._extrapolate(lambda: _count_evaluation(self._loss_model, batch))

    def _extrapolate(self, count: Callable[[], LiveBytes]) -> LiveBytes:
        """Count one layer of each kind, then add each kind's second layer as often as the kind has more layers."""
        firsts = [members[0] for members in self._kinds.values()]
        total = one_each = self._with_layers(firsts, count)
        for members in self._kinds.values():
            if len(members) > 1:
                added = self._with_layers(sorted([*firsts, members[1]]), count).plus(one_each, -1.0)
                total = total.plus(added, len(members) - 1)
        return LiveBytes(total.saved, max(0.0, total.head), max(0.0, total.layer))

    def _with_layers(self, indices: list[int], count: Callable[[], LiveBytes]) -> LiveBytes:
        """Count with these layers alone in the model, then restore all layers."""
        setattr(self._parent, self._name, nn.ModuleList(self._layers[index] for index in indices))
        if self._types:
            self._config.layer_types = [self._types[index] for index in indices]
        try:
            return count()
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as problem:
            raise BaseModelError(
                f"{type(self._model).__name__} cannot be run without weights, so its memory is not known"
                f" ({type(problem).__name__}: {str(problem).splitlines()[0]})"
            ) from problem
        finally:
            setattr(self._parent, self._name, self._layers)
            if self._types:
                self._config.layer_types = self._types


def _layer_kinds(layers: nn.ModuleList, types: Sequence[str]) -> Mapping[Any, list[int]]:
    """Group layer indices by the facts that decide a layer's memory.

    These are its tensors, its attention, and whether a layer before it is trainable: only then its input needs a
    gradient.
    """
    kinds: dict[Any, list[int]] = {}
    input_needs_gradient = False
    for index, layer in enumerate(layers):
        tensors = tuple((name, p.shape, p.requires_grad) for name, p in layer.named_parameters())
        attention = types[index] if types else None
        kinds.setdefault((type(layer), tensors, attention, input_needs_gradient), []).append(index)
        input_needs_gradient = input_needs_gradient or any(p.requires_grad for p in layer.parameters())
    return kinds


def _measure_training_step(loss_model: LossModel, batch: MicroBatch) -> LiveBytes:
    counter = MemoryCounter(_without_needless_mask(loss_model, batch), loss_model.model)
    with counter, FlashAttentionMode(), _mark_head_phase(loss_model, counter):
        token_scores(loss_model, _meta_batch(batch)).losses.sum().backward()
    return LiveBytes(counter.saved, counter.peak["head"] - counter.saved, counter.peak["layer"] - counter.saved)


def _count_evaluation(loss_model: LossModel, batch: MicroBatch) -> LiveBytes:
    counter = MemoryCounter(_without_needless_mask(loss_model, batch), loss_model.model)
    with counter, FlashAttentionMode(), torch.no_grad():
        token_scores(loss_model, _meta_batch(batch))
    return LiveBytes(0.0, max(counter.peak.values()), 0.0)


def _without_needless_mask(loss_model: LossModel, batch: MicroBatch) -> MicroBatch:
    """Return the batch with ``masked`` as packed attention needs it: only for rows longer than a sliding window."""
    if not (batch.packed and loss_model.packed_attention):
        return batch
    config: Any = loss_model.model.config
    window = getattr(config.get_text_config(), "sliding_window", None)
    return replace(batch, masked=window is not None and max(batch.row_lengths) > window)


def _meta_batch(batch: MicroBatch) -> Batch:
    ids = torch.zeros(batch.lines, batch.width, dtype=torch.long, device=META)
    labels = torch.full_like(ids, IGNORE_INDEX)
    mask = None if batch.packed else torch.ones_like(ids)
    positions = torch.zeros_like(ids)
    return Batch(ids, labels, positions, mask, (0,), batch.num_tokens, batch.num_labels, batch.row_lengths)


@contextmanager
def _mark_head_phase(loss_model: LossModel, counter: "MemoryCounter") -> Iterator[None]:
    """Set the counter's phase to "head" from the head's forward to the end of the head's backward."""
    head: nn.Module = loss_model.head or loss_model.model.get_output_embeddings()  # type: ignore[operator]

    def begin(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        counter.saved, counter.phase = counter.alive, "head"
        counter.peak["head"] = max(counter.peak["head"], counter.alive)
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda gradient: setattr(counter, "phase", "layer"))

    handle = head.register_forward_pre_hook(begin)
    try:
        yield
    finally:
        handle.remove()


def _recompute_contexts() -> tuple[Any, Any]:
    """Return the contexts of a layer's forward and of its recomputation.

    Recomputation needs a mode of its own, because it runs inside `Tensor.backward`: a function mode intercepts that
    call, and torch disables the mode during the interception.
    """
    return nullcontext(), FlashAttentionMode()


@final
class MemoryCounter(TorchDispatchMode):
    """Counts the bytes of storages from allocation to release.

    On the meta device tensors have no values, so operations whose result depends on values get the result that a
    micro-batch of the given shape would give: its number of labels, attention masks that are dropped where possible,
    and experts with equal shares of the tokens.
    """

    def __init__(self, batch: MicroBatch, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._batch, self._num_experts = batch, _num_experts(model)
        self._sizes: dict[int, int] = {}
        self.alive, self.saved, self.phase = 0, 0, "layer"
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

    Attention with dropout, as in GPT-2, runs unchanged: torch then has no such kernel and saves all scores.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and not (kwargs or {}).get("dropout_p"):
            return _flash_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # torch converts a boolean mask to floats in every call
        zero = torch.zeros((), dtype=query.dtype, device=META)
        attn_mask = torch.where(attn_mask, zero, zero)
    attended: Tensor = ATEN._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return attended


def _grouped_product(x: Tensor, y: Tensor, offs: Tensor | None = None, **settings: Any) -> Tensor:
    """Return the result's shape of torch._grouped_mm, whose own meta function accepts bfloat16 only.

    Either rows of several experts times each expert's weight, or columns times rows: the gradient of these weights.
    """
    if x.dim() == y.dim() == 2:
        assert offs is not None
        return torch.empty(len(offs), x.shape[0], y.shape[1], dtype=x.dtype, device=META)
    return torch.empty(*x.shape[:-1], y.shape[-1], dtype=x.dtype, device=META)


def _num_experts(model: nn.Module) -> int:
    config: Any = model.config
    config = config.get_text_config()
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((int(getattr(config, name)) for name in names if getattr(config, name, None)), 1)
