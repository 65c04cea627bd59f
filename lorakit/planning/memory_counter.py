"""Bytes that are alive while a model runs on the meta device, where tensors have shapes and no memory.

What depends on values there is answered as a micro-batch of a given form would have it.
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

ATEN: Final = torch.ops.aten
META: Final = torch.device("meta")


@dataclass(frozen=True)
class MicroBatch:
    """The form of one micro-batch: ``lines`` of ``width`` tokens, of which ``num_labels`` are learnt.

    Packed: one line, of rows of ``row_lengths`` tokens.
    """

    lines: int
    width: int
    num_labels: int
    packed: bool
    masked: bool
    """Whether attention needs a mask: several rows in a line, or padding."""
    row_lengths: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.lines * self.width


@final
class MemoryCounter(TorchDispatchMode):
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
        made = (_grouped_product if packet is ATEN._grouped_mm else func)(*args, **(kwargs or {}))
        if packet is ATEN.all:
            self._alls.add(made.untyped_storage()._cdata)
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        if func.namespace != ATEN.name and getattr(args[0], "dtype", None) is torch.int8:
            self.peak[self.phase] = max(self.peak[self.phase], self.alive + made.nbytes)  # floats in two products
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
class FlashAttentionMode(TorchFunctionMode):
    """Attention that keeps queries, keys, values, output and a number per row and head, as the kernels in use do.

    With dropout in it, as in GPT-2, it is what torch does without such a kernel: all scores are kept.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and not (kwargs or {}).get("dropout_p"):
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


def _grouped_product(x: Tensor, y: Tensor, offs: Tensor | None = None, **rest: Any) -> Tensor:
    """Rows of several experts times the weight of each, or columns times rows: the gradient of these weights.

    torch's own meta function knows bfloat16 alone.
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
