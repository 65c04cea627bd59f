"""Count the bytes that operations on the meta device allocate, from the making of a storage to its end.

On the meta device tensors have no values and kernels do not run, so both modes here supply what a real run would have:
results that depend on values, and the tensors that flash attention saves.
"""

import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lorakit.ops._internals import storage_id

ATEN: Final = torch.ops.aten
META: Final = torch.device("meta")


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
    results = None
    if query.shape[-1] == value.shape[-1]:
        results = ATEN._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=_as_floats(attn_mask, query), scale=scale
        )
    elif on_gpu:
        results = ATEN._scaled_dot_product_efficient_attention(
            query, key, value, _as_floats(attn_mask, query), True, dropout_p, is_causal, scale=scale
        )
    return None if results is None else results[0]


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
