"""A GPU that is a CPU: tensors that say they are on cuda:0, compute on the CPU, and refuse to meet tensors of the CPU.

Inside `pretend_gpu()`, `torch.device("cuda")` gives such tensors. `SYNCS` counts the places where a real GPU would make
Python wait, and `COPIES` those where the host sends something to it.

A wrapper subclass whose C++ device is meta, because autograd's C++ aborts the process for a cuda device in a CPU build:
torch's own FakeTensorMode cannot be used for a step. Values are real, so `.item()` works, and is counted. Not for kernels,
memory, streams or torch.distributed.
"""

import contextlib
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

import lorakit

GPU: Final = torch.device("cuda", 0)
SYNCS: Final[Counter[str]] = Counter()
"""operation and place -> times that Python would wait for the GPU"""
COPIES: Final[Counter[str]] = Counter()
"""operation and place -> copies from the host"""

_PACKAGES: Final = [Path(str(package.__file__)).parent for package in (lorakit, transformers)]
_aten = torch.ops.aten
_INDEXING: Final = {
    _aten.index.Tensor,
    _aten.index_put_.default,
    _aten.index_put.default,
    _aten._index_put_impl_.default,
}
_COPYING: Final = {_aten.copy_.default, _aten._to_copy.default}
_WAITING: Final = {
    _aten._local_scalar_dense.default, _aten.nonzero.default, _aten.equal.default, _aten.masked_select.default,
    _aten.is_nonzero.default, _aten.item.default, _aten.repeat_interleave.Tensor, _aten._unique2.default,
}  # fmt: skip


class OnGpu(Tensor):
    """A tensor on the pretended GPU. `inner` has its values, on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OnGpu":
        made: OnGpu = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device="meta",
        )  # fmt: skip
        return made

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    device = property(lambda self: GPU)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OnGpu({self.inner})"

    def get_device(self) -> int:
        return 0

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return self.detach().cpu().numpy()

    def tolist(self) -> Any:
        SYNCS[f"tolist {_place()}"] += 1
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _place() -> str:
    """Return the innermost line of lorakit or transformers that is running, as file:line."""
    for frame in reversed(traceback.extract_stack()):
        for package in _PACKAGES:
            if frame.filename.startswith(f"{package}/"):
                return f"{Path(frame.filename).relative_to(package.parent)}:{frame.lineno}"
    return "elsewhere"


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, OnGpu) else value


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    on_gpu = [tensor for tensor in tensors if isinstance(tensor, OnGpu)]
    device = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    if device is not None and device.type == "meta" and on_gpu:
        device = GPU  # C++ has read a wrapper's own device
    to_gpu = device is not None and device.type == "cuda"
    if to_gpu:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if on_gpu:
        _count(func, args, device)
        if func not in _COPYING:
            _refuse_other_devices(func, args, tensors)
    if to_gpu and func is _aten._to_copy.default and not on_gpu:
        COPIES[f"to {_place()}"] += 1
    if func is _aten.where.self:  # backward makes its zero in C++, on meta
        args = tuple(
            torch.zeros((), dtype=x.dtype) if not isinstance(x, OnGpu) and x.is_meta and x.dim() == 0 else x
            for x in args
        )
    out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    if not to_gpu and not (on_gpu and not (device is not None and device.type == "cpu")):
        return out
    if func is _aten.copy_.default and not isinstance(args[0], OnGpu):
        return args[0]
    wrapped = tree_map(lambda x: OnGpu(x) if isinstance(x, Tensor) else x, out)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if on_gpu else wrapped


def _count(func: Any, args: Any, device: torch.device | None) -> None:
    """Count an operation on tensors of the GPU, if it waits or copies."""
    masks = [x for x in tree_leaves(args[1:2]) if isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)]
    to_cpu = func is _aten._to_copy.default and device is not None and device.type == "cpu"
    if func in _WAITING or to_cpu or (func in _INDEXING and masks):
        SYNCS[f"{func} {_place()}"] += 1
    if func is _aten.copy_.default and isinstance(args[0], OnGpu) != isinstance(args[1], OnGpu):
        (SYNCS if isinstance(args[1], OnGpu) else COPIES)[f"{func} {_place()}"] += 1


def _refuse_other_devices(func: Any, args: Any, tensors: list[Tensor]) -> None:
    """Raise as a GPU does where tensors of two devices meet; scalars may, and indices are copied."""
    for tensor in tensors:
        is_counter = "_fused_" in str(func)  # a fused optimizer's kernel reads even its step count on the GPU
        if isinstance(tensor, OnGpu) or tensor.device.type != "cpu" or (tensor.dim() == 0 and not is_counter):
            continue
        if func in _INDEXING and tensor is not args[0] and (func is _aten.index.Tensor or tensor is not args[2]):
            COPIES[f"index {_place()}"] += 1
            continue
        raise RuntimeError(f"Expected all tensors to be on the same device: {func} at {_place()}")


class _DispatchMode(TorchDispatchMode):
    """Sees what is made on the GPU out of nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _FunctionMode(TorchFunctionMode):
    """Adapts calls that C++ would carry out before any dispatch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {**(kwargs or {})}
        kwargs.pop("pin_memory", None)
        if func is torch.device:
            return func(*args, **kwargs)
        if func is torch._C._nn.pad_sequence:  # C++ would make the result on meta
            size = max(map(len, args[0]))
            return torch.stack([F.pad(one, (0, size - len(one)), value=args[2]) for one in args[0]])
        if func is Tensor.tolist and isinstance(args[0], OnGpu):
            return OnGpu.tolist(args[0])
        if func is Tensor.__setitem__ and isinstance(args[0], OnGpu) and not isinstance(args[2], Tensor):
            args = (args[0], args[1], OnGpu(torch.full((), args[2], dtype=args[0].dtype)))
        is_indexing = func is Tensor.__getitem__ or func is Tensor.__setitem__
        if is_indexing and isinstance(args[0], OnGpu) and isinstance(args[1], list):
            args = (args[0], torch.tensor(args[1]), *args[2:])  # C++ would make the index on meta, without values
        if func in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or "cpu").type == "cuda":
            made = func(*args, **{key: value for key, value in kwargs.items() if key != "device"})
            COPIES[f"{func.__name__} {_place()}"] += 1
            return made if isinstance(made, OnGpu) else OnGpu(made)
        return func(*map(_with_index, args), **{key: _with_index(value) for key, value in kwargs.items()})


def _with_index(value: Any) -> Any:
    """Return cuda:0 for "cuda"."""
    if isinstance(value, str) and value == "cuda":
        return GPU
    return GPU if isinstance(value, torch.device) and value.type == "cuda" and value.index is None else value


def _sdpa(
    q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Attention without dropout, by the kernel of the CPU."""
    assert dropout_p == 0
    if k.shape[1] != q.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        zeros = torch.zeros(attn_mask.shape, dtype=q.dtype, device=attn_mask.device)
        attn_mask = zeros.masked_fill_(~attn_mask, -float("inf"))
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


@contextlib.contextmanager
def pretend_gpu() -> Iterator[None]:
    """Pretend inside the block that this machine has one GPU. Both counters start at zero."""
    import bitsandbytes  # noqa: F401 - imports after this would look for a real GPU
    import transformers.generation  # noqa: F401

    plain_sdpa, plain_where, generator = F.scaled_dot_product_attention, torch.where, torch.Generator

    def where(condition: Any, *values: Any) -> Any:
        if not values or not isinstance(condition, OnGpu):
            return plain_where(condition, *values)
        dtype = next((x.dtype for x in values if isinstance(x, Tensor)), None)
        return plain_where(
            condition, *[x if isinstance(x, Tensor) else OnGpu(torch.full((), x, dtype=dtype)) for x in values]
        )

    def sdpa(q: Any, *args: Any, **kwargs: Any) -> Any:
        return (_sdpa if isinstance(q, OnGpu) else plain_sdpa)(q, *args, **kwargs)

    class Generator:
        def __new__(cls, device: Any = "cpu") -> Any:
            return generator()

    of_cuda = {
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8), "set_rng_state": lambda *_: None,
        "is_available": lambda: True, "is_initialized": lambda: True, "current_device": lambda: 0,
        "device_count": lambda: 1, "synchronize": lambda *_: None, "manual_seed_all": lambda seed: None,
        "get_device_name": lambda device=None: "pretended", "max_memory_allocated": lambda *_: 1,
        "_lazy_init": lambda: None, "get_device_capability": lambda *_: (7, 0), "is_bf16_supported": lambda *_: False,
    }  # fmt: skip
    SYNCS.clear()
    COPIES.clear()
    with contextlib.ExitStack() as stack:
        for name, value in of_cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch, "Generator", Generator))
        stack.enter_context(mock.patch.object(torch, "where", where))
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", sdpa))
        stack.enter_context(_FunctionMode())
        stack.enter_context(_DispatchMode())
        yield
