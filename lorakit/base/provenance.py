"""Where the elements of a tensor come from: found out by watching what is done to stand-ins for stored tensors.

A ``Traced`` tensor is on the meta device and carries its origin through every operation. Concatenating, stacking and
cutting are understood, so a range of the result is a few ranges of stored tensors; anything else is remembered and
done again on whole tensors. What is written in place loses its origin, which is never guessed.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor

ORIGIN: Final = "lorakit_origin"
"""the attribute in which a tensor without data carries its origin"""
MAX_BLOCKS: Final = 1 << 16  # more, and reading them one by one takes longer than doing the operation again


@dataclass(frozen=True, eq=False)
class WeightSource(ABC):
    """How a tensor is made of stored ones. Its elements are counted in row-major order."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @abstractmethod
    def fill(self, out: Tensor, start: int, read: "Read") -> None:
        """Fill a flat tensor with the elements from ``start`` on."""

    @abstractmethod
    def leaves(self) -> "Iterator[StoredTensor]":
        """The stored tensors it is made of."""

    def whole(self, read: "Read") -> Tensor:
        """All of it, on the CPU."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.fill(tensor.view(-1), 0, read)
        return tensor


@final
@dataclass(frozen=True, eq=False)
class StoredTensor(WeightSource):
    """A stored tensor, in the dtype it is loaded in."""

    name: str

    def fill(self, out: Tensor, start: int, read: "Read") -> None:
        read(self, out, start)

    def leaves(self) -> "Iterator[StoredTensor]":
        yield self


Read = Callable[[StoredTensor, Tensor, int], None]
"""Fills a flat tensor with the elements of a stored one from an index on."""


@dataclass(frozen=True)
class StridedRun:
    """Runs of ``run`` elements of an origin: the first at ``offset``, then one every ``step`` elements."""

    origin: WeightSource
    step: int
    offset: int
    run: int


@final
@dataclass(frozen=True, eq=False)
class Interleaved(WeightSource):
    """Blocks of one run from each strand: what concatenating, stacking and cutting along any dimension give."""

    strands: tuple[StridedRun, ...]

    def fill(self, out: Tensor, start: int, read: Read) -> None:
        block_size, done = sum(strand.run for strand in self.strands), 0
        while done < len(out):
            block, inside = divmod(start + done, block_size)
            for strand in self.strands:
                count = min(strand.run - inside, len(out) - done)
                if count > 0:
                    first = block * strand.step + strand.offset + inside
                    strand.origin.fill(out[done : done + count], first, read)
                    done += count
                inside = max(0, inside - strand.run)

    def leaves(self) -> Iterator[StoredTensor]:
        for strand in self.strands:
            yield from strand.origin.leaves()


@final
@dataclass(frozen=True, eq=False)
class Recomputed(WeightSource):
    """A result of any other operation, which is done again on whole tensors when a part of it is read."""

    operation: Callable[..., Any]
    args: Any
    kwargs: Any
    index: int | None
    """which of several results"""

    def fill(self, out: Tensor, start: int, read: Read) -> None:
        def real(leaf: Any) -> Any:
            return leaf.whole(read) if isinstance(leaf, WeightSource) else leaf

        results = self.operation(*_mapped(self.args, real), **_mapped(self.kwargs, real))
        result = results if self.index is None else results[self.index]
        out.copy_(result.reshape(-1)[start : start + len(out)])

    def leaves(self) -> Iterator[StoredTensor]:
        found: list[WeightSource] = []

        def note(leaf: Any) -> Any:
            if isinstance(leaf, WeightSource):
                found.append(leaf)
            return leaf

        _mapped([self.args, self.kwargs], note)
        for origin in found:
            yield from origin.leaves()


class TracedTensor(Tensor):
    """A tensor without data that knows its origin; use ``traced`` and ``origin_of``."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        several = isinstance(results, (tuple, list))
        for index, made in enumerate(results if several else [results]):
            if isinstance(made, TracedTensor) and ORIGIN not in vars(made):
                shapes = [tuple(each.shape) for each in results] if several else [tuple(made.shape)]
                which = index if several else None
                vars(made)[ORIGIN] = _derive(func, args, kwargs or {}, shapes, which, made.dtype)
        return results


def traced(origin: WeightSource) -> TracedTensor:
    """A stand-in for a tensor of this origin."""
    tensor = torch.empty(origin.shape, dtype=origin.dtype, device="meta").as_subclass(TracedTensor)
    vars(tensor)[ORIGIN] = origin
    return tensor


def origin_of(tensor: Tensor) -> WeightSource | None:
    """Where a tensor's elements come from, or None when that is not known."""
    if not isinstance(tensor, TracedTensor) or tensor._version > 0:  # something was written into it
        return None
    origin: WeightSource | None = vars(tensor)[ORIGIN]
    return origin


class _Unknown(Exception):
    """An operation on something that has no origin."""


def _derive(
    func: Any, args: Any, kwargs: Any, shapes: list[tuple[int, ...]], index: int | None, dtype: torch.dtype
) -> WeightSource | None:
    try:
        args, kwargs = _mapped(args, _known), _mapped(kwargs, _known)
    except _Unknown:
        return None
    shape = shapes[index or 0]
    if func in UNCHANGED:
        origin: WeightSource = args[0]
        return origin
    if func in RULES and kwargs.keys() <= {"dim"}:
        strands = RULES[func](shapes, index or 0, *args, **kwargs)
        if strands is not None and all(strand.origin.dtype == dtype for strand in strands):
            return Interleaved(shape, dtype, tuple(strands))
    return Recomputed(shape, dtype, func, args, kwargs, index)


def _known(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    found = origin_of(leaf)
    if found is None and leaf.is_meta:
        raise _Unknown
    return leaf if found is None else found


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, (list, tuple)):
        parts = [_mapped(each, change) for each in value]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, dict):
        return {key: _mapped(each, change) for key, each in value.items()}
    return change(value)


def _concatenated(
    shapes: list[tuple[int, ...]], index: int, tensors: list[WeightSource], dim: int = 0
) -> list[StridedRun] | None:
    """From (..., d1, ...) and (..., d2, ...): each block takes d1 rows of the first, then d2 of the second."""
    dim %= len(shapes[index])
    if any(len(each.shape) != len(shapes[index]) for each in tensors):
        return None  # torch.cat skips empty tensors of one dimension
    runs = [math.prod(each.shape[dim:]) for each in tensors]
    return _few(shapes[index][:dim], [StridedRun(each, run, 0, run) for each, run in zip(tensors, runs, strict=True)])


def _stacked(
    shapes: list[tuple[int, ...]], index: int, tensors: list[WeightSource], dim: int = 0
) -> list[StridedRun] | None:
    dim %= len(shapes[index])
    run = math.prod(shapes[index][dim + 1 :])
    return _few(shapes[index][:dim], [StridedRun(each, run, 0, run) for each in tensors])


def _cut(
    shapes: list[tuple[int, ...]], index: int, tensor: WeightSource, sizes: Any, dim: int = 0
) -> list[StridedRun] | None:
    """One of the pieces that a tensor is cut into along a dimension; their sizes are those of the results."""
    dim %= len(tensor.shape)
    offset = sum(math.prod(shape[dim:]) for shape in shapes[:index])
    strand = StridedRun(tensor, math.prod(tensor.shape[dim:]), offset, math.prod(shapes[index][dim:]))
    return _few(tensor.shape[:dim], [strand])


def _few(outer: tuple[int, ...], strands: list[StridedRun]) -> list[StridedRun] | None:
    return strands if math.prod(outer) <= MAX_BLOCKS else None


UNCHANGED: Final = {Tensor.detach, Tensor.contiguous}
RULES: Final[dict[Any, Callable[..., list[StridedRun] | None]]] = {
    torch.cat: _concatenated,
    torch.stack: _stacked,
    torch.chunk: _cut,
    torch.split: _cut,
}
