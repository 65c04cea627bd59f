"""What one micro-batch allocates: forward and backward of the model itself, on tensors without memory.

Every operation runs on the meta device, so sizes are exact whatever the architecture, no weight is read and no
product computed. Counted is what is alive at once: activations, gradients in flight, logits; not parameters and not
the adapter's gradients. Layers that are alike are run once or twice and multiplied: memory is linear in their number.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lorakit.batch import IGNORED, Batch
from lorakit.errors import BaseModelError
from lorakit.job import CHECKPOINTS, checkpoint_layers
from lorakit.loss import loss_sum
from lorakit.plan.shapes import adapted_skeleton, repeated_layers
from lorakit.recipe import AdapterSection

ATEN: Final = torch.ops.aten
META: Final = torch.device("meta")


@dataclass(frozen=True)
class MicroBatch:
    """The form of one micro-batch: ``lines`` of ``width`` tokens, of which ``num_labels`` are learnt."""

    lines: int
    width: int
    num_labels: int
    packed: bool
    masked: bool
    """Whether attention needs a mask: several rows in a line, or padding."""

    @property
    def num_tokens(self) -> int:
        return self.lines * self.width


@dataclass(frozen=True)
class Live:
    """Bytes alive at once: what forward keeps for backward, and the most above that, by what is computed."""

    saved: float
    head: float
    """While output head and loss are computed, forward and backward."""
    layer: float
    """At any other time."""

    def plus(self, other: "Live", times: float) -> "Live":
        return Live(
            self.saved + times * other.saved, self.head + times * other.head, self.layer + times * other.layer
        )


@final
class Tracer:
    """Runs micro-batches through the model of a folder."""

    def __init__(self, folder: Path, adapter: AdapterSection, dtype: torch.dtype, *, checkpointing: bool) -> None:
        self._model = adapted_skeleton(folder, adapter, dtype).train()
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

    def training(self, batch: MicroBatch) -> Live:
        """Of forward and backward."""
        return self._multiplied(lambda: _training(self._model, batch))

    def evaluating(self, batch: MicroBatch) -> Live:
        """Of a forward that keeps nothing."""
        return self._multiplied(lambda: _evaluating(self._model, batch))

    def _multiplied(self, run: Callable[[], Live]) -> Live:
        """For one layer of each kind, and for each kind what one more adds."""
        firsts = [members[0] for members in self._kinds.values()]
        total = one_each = self._with(firsts, run)
        for members in self._kinds.values():
            if len(members) > 1:
                more = self._with(sorted([*firsts, members[1]]), run).plus(one_each, -1.0)
                total = total.plus(more, len(members) - 1)
        return Live(total.saved, max(0.0, total.head), max(0.0, total.layer))

    def _with(self, chosen: list[int], run: Callable[[], Live]) -> Live:
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


def _training(model: nn.Module, batch: MicroBatch) -> Live:
    count = _Count(batch, model)
    with count, _Attention(), _noting_the_head(model, count):
        loss_sum(model, _made(batch)).backward()  # type: ignore[no-untyped-call]
    return Live(count.saved, count.peak["head"] - count.saved, count.peak["layer"] - count.saved)


def _evaluating(model: nn.Module, batch: MicroBatch) -> Live:
    count = _Count(batch, model)
    with count, _Attention(), torch.no_grad():
        loss_sum(model, _made(batch))
    return Live(0.0, max(count.peak.values()), 0.0)


def _made(batch: MicroBatch) -> Batch:
    ids = torch.zeros(batch.lines, batch.width, dtype=torch.long, device=META)
    labels = torch.full_like(ids, IGNORED)
    mask = None if batch.packed else torch.ones_like(ids)
    return Batch(ids, labels, torch.zeros_like(ids), mask, (0,), batch.num_tokens, batch.num_labels)


@contextmanager
def _noting_the_head(model: nn.Module, count: "_Count") -> Iterator[None]:
    """Tell ``count`` when the head begins, and when backward has left it."""
    head = model.get_output_embeddings()  # type: ignore[operator]

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


@final
class _Count(TorchDispatchMode):
    """Counts the bytes of storages from their making to their end, and answers what depends on values.

    Answers: as many labels as the micro-batch has, attention masks that can be left out where they can, and experts
    that all have their share of the tokens.
    """

    def __init__(self, batch: MicroBatch, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._batch, self._experts = batch, _num_experts(model)
        self._sizes: dict[int, int] = {}
        self.alive, self.saved, self.phase = 0, 0, "layer"
        self.peak: Counter[str] = Counter()
        self._alls: set[int] = set()
        for parameter in model.parameters():
            self._sizes[parameter.untyped_storage()._cdata] = 0
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            if parameter.grad is not None:
                self._sizes[parameter.grad.untyped_storage()._cdata] = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if func is ATEN._local_scalar_dense.default:
            return args[0].untyped_storage()._cdata in self._alls and not self._batch.masked
        if packet is ATEN.nonzero:
            return torch.zeros(self._num_found(args[0]), args[0].dim(), dtype=torch.long, device=META)
        if packet in (ATEN.index, ATEN.index_put, ATEN.index_put_, ATEN._index_put_impl_):
            args = (args[0], [place for given in args[1] for place in self._places(given)], *args[2:])
        made = _grouped_product(*args[:2]) if packet is ATEN._grouped_mm else func(*args, **(kwargs or {}))
        if packet is ATEN.all:
            self._alls.add(made.untyped_storage()._cdata)
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        return made

    def _places(self, given: Tensor | None) -> list[Tensor | None]:
        """A mask as positions: how many it names would depend on its values."""
        if given is None or given.dtype != torch.bool:
            return [given]
        return [torch.zeros(self._num_found(given), dtype=torch.long, device=META)] * given.dim()

    def _num_found(self, mask: Tensor) -> int:
        if mask.numel() == self._batch.num_tokens:
            return self._batch.num_labels
        return mask.numel() if mask.dim() == 1 else max(1, mask.numel() // self._experts)

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.alive += self._sizes[key]
        weakref.finalize(storage, self._forget, key)
        self.peak[self.phase] = max(self.peak[self.phase], self.alive)

    def _forget(self, key: int) -> None:
        self.alive -= self._sizes.pop(key, 0)
        self._alls.discard(key)


@final
class _Attention(TorchFunctionMode):
    """Attention that keeps queries, keys, values, output and a number per row and head, as the kernels in use do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # every call makes numbers of it
        zero = torch.zeros((), dtype=query.dtype, device=META)
        attn_mask = torch.where(attn_mask, zero, zero)
    attended: Tensor = ATEN._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return attended


def _grouped_product(x: Tensor, weights: Tensor) -> Tensor:
    """Rows of several experts times the weight of each; torch's own meta function knows bfloat16 alone."""
    return torch.empty(*x.shape[:-1], weights.shape[-1], dtype=x.dtype, device=META)


def _also_recomputing() -> tuple[Any, Any]:
    """Contexts of a layer's forward and of its recomputation, in which the modes around it are not seen."""
    return nullcontext(), _Attention()


def _num_experts(model: nn.Module) -> int:
    config: Any = model.config
    config = config.get_text_config()
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((int(getattr(config, name)) for name in names if getattr(config, name, None)), 1)
