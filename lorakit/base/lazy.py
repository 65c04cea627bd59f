"""Read any part of a base's parameters from its files, when that part is needed.

The operations that transformers runs to load a parameter are recorded. Here it renames, merges and splits placeholders:
tensors on the meta device that record every operation (``TracedTensor``). The record is a ``WeightSource``, which can
then read any range of the parameter from the files.

Invariants: a source is never guessed. A tensor that was written in place has none, and neither has what is made of it.
Reading a range takes the memory of the range and of one piece, and maps no file. Only a ``Recomputed`` parameter takes
the memory of the full parameter, one parameter at a time.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lorakit.base._internals import was_written
from lorakit.errors import BaseModelError, PatchError, translate_error
from lorakit.files.base_files import BaseFiles, open_base_files

SOURCE_ATTRIBUTE: Final = "lorakit_source"
"""attribute of a tensor on the meta device: its WeightSource, or None if that is unknown"""
MAX_BLOCKS: Final = 1 << 16  # because reading more short runs one by one takes longer than repeating the operation
PIECE_BYTES: Final = 1 << 24


@dataclass(frozen=True, eq=False)
class WeightSource(ABC):
    """How a tensor is computed from stored tensors. Its elements are counted in row-major order."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @abstractmethod
    def fill(self, out: Tensor, start: int, read: "ReadStored") -> None:
        """Fill a flat tensor with the elements from ``start`` on."""

    def read_full(self, read: "ReadStored") -> Tensor:
        """Return the full tensor, on the CPU."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.fill(tensor.view(-1), 0, read)
        return tensor


@final
@dataclass(frozen=True, eq=False)
class StoredTensor(WeightSource):
    """A stored tensor, such as `model.norm.weight`, unchanged but for its dtype."""

    name: str  # name in the files

    def fill(self, out: Tensor, start: int, read: "ReadStored") -> None:
        read(self, out, start)


ReadStored = Callable[[StoredTensor, Tensor, int], None]
"""Fills a flat tensor with the elements of a stored tensor from an index on."""


@dataclass(frozen=True)
class StridedRun:
    """Runs of ``length`` elements from ``offset`` on, one every ``stride``, such as the left half of all rows."""

    source: WeightSource
    stride: int
    offset: int
    length: int


@final
@dataclass(frozen=True, eq=False)
class Interleaved(WeightSource):
    """Blocks, each of one run from every source in turn: the result of cat, stack, chunk and split.

    Example: `torch.cat([a, b], dim=1)` of two (4, 6) tensors is 4 blocks (its rows). Each block is 6 elements of `a`,
    then 6 elements of `b`. A range of the result is then a few ranges of `a` and `b`, and nothing else is read.
    """

    runs: tuple[StridedRun, ...]

    def fill(self, out: Tensor, start: int, read: ReadStored) -> None:
        block_size = sum(run.length for run in self.runs)
        done = 0
        while done < len(out):
            block, skip = divmod(start + done, block_size)  # elements of the block before the next one to read
            for run in self.runs:
                count = min(run.length - skip, len(out) - done)
                if count > 0:
                    first = block * run.stride + run.offset + skip
                    run.source.fill(out[done : done + count], first, read)
                    done += count
                skip = max(0, skip - run.length)


@final
@dataclass(frozen=True, eq=False)
class Recomputed(WeightSource):
    """The result of any other operation, repeated on full tensors whenever a part of it is read.

    Example: experts that are stored transposed, `torch.stack(experts).transpose(1, 2)`: a range of the result is
    scattered over the stored tensor, so the full tensor is read, transposed and cut.
    """

    operation: Callable[..., Any]
    args: Any  # positional arguments, with a WeightSource in the position of each traced tensor
    kwargs: Any
    index: int  # of the result, for an operation with several

    def fill(self, out: Tensor, start: int, read: ReadStored) -> None:
        def real(leaf: Any) -> Any:
            return leaf.read_full(read) if isinstance(leaf, WeightSource) else leaf

        results = self.operation(*tree_map(real, self.args), **tree_map(real, self.kwargs))
        result = results[self.index] if isinstance(results, (tuple, list)) else results
        out.copy_(result.reshape(-1)[start : start + len(out)])


def stored_parts(source: WeightSource) -> list[tuple[StoredTensor, int | None]]:
    """Return the stored tensors that a tensor is read from, each with the index of its first element.

    The index is None for one that is there in part, or in another order.
    """
    parts: list[tuple[StoredTensor, int | None]] = []

    def note(stored: StoredTensor, out: Tensor, start: int) -> None:
        # concatenated sources fill the meta tensor itself; a recomputed one reads into tensors with data
        is_full = out.is_meta and start == 0 and out.numel() == math.prod(stored.shape)
        parts.append((stored, int(out.storage_offset()) if is_full else None))

    source.fill(torch.empty(math.prod(source.shape), device="meta"), 0, note)
    return parts


class TracedTensor(Tensor):
    """A placeholder for a tensor: on the meta device, without data, with its WeightSource as an attribute.

    Every torch function on a TracedTensor computes shapes as usual and attaches a source to each result. Example:
    `torch.cat([a, b])` of two traced tensors returns a traced tensor whose source is ``Interleaved``.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        each = results if isinstance(results, (tuple, list)) else [results]
        for index, result in enumerate(each):
            # in-place operations return their input, which has a source already; its version counter shows the write
            if isinstance(result, TracedTensor) and SOURCE_ATTRIBUTE not in vars(result):
                shapes = [tuple(one.shape) for one in each]
                vars(result)[SOURCE_ATTRIBUTE] = _derive(func, args, kwargs or {}, shapes, index, result.dtype)
        return results


def traced(source: WeightSource) -> TracedTensor:
    tensor = torch.empty(source.shape, dtype=source.dtype, device="meta").as_subclass(TracedTensor)
    vars(tensor)[SOURCE_ATTRIBUTE] = source
    return tensor


def source_of(tensor: Tensor) -> WeightSource | None:
    """Return the source of a placeholder, or of a parameter of a model from ``load_on_meta``; None if unknown."""
    if isinstance(tensor, TracedTensor) and was_written(tensor):
        return None  # because its elements are no longer those of the recorded operations
    return vars(tensor).get(SOURCE_ATTRIBUTE)


def _derive(
    func: Any, args: Any, kwargs: Any, shapes: list[tuple[int, ...]], index: int, dtype: torch.dtype
) -> WeightSource | None:
    """Return the source of result ``index`` of an operation whose results have these shapes; None if unknown."""
    tensors = (leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, Tensor))
    if any(tensor.is_meta and source_of(tensor) is None for tensor in tensors):
        return None
    args, kwargs = tree_map(lambda leaf: source_of(leaf) or leaf if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    shape = shapes[index]
    if func in UNCHANGED:
        return args[0]
    if func in RULES and kwargs.keys() <= {"dim"}:
        runs = RULES[func](shapes, index, *args, **kwargs)
        block_size = sum(run.length for run in runs)
        # torch.cat of mixed dtypes converts its inputs, which reading runs would not
        if block_size * MAX_BLOCKS >= math.prod(shape) and all(run.source.dtype == dtype for run in runs):
            return Interleaved(shape, dtype, tuple(runs))
    return Recomputed(shape, dtype, func, args, kwargs, index)


def _joined_runs(
    shapes: list[tuple[int, ...]], index: int, tensors: list[WeightSource], dim: int = 0
) -> list[StridedRun]:
    """From (..., d1, ...) and (..., d2, ...): each block is d1 rows of the first tensor, then d2 of the second.

    For a stack, a block is one run of every tensor, of all its dimensions from the new one on.
    """
    dim %= len(shapes[index])
    if len({len(each.shape) for each in tensors}) > 1:
        return []  # because torch.cat skips empty tensors of one dimension
    lengths = [math.prod(each.shape[dim:]) for each in tensors]
    return [StridedRun(each, length, 0, length) for each, length in zip(tensors, lengths, strict=True)]


def _split_runs(
    shapes: list[tuple[int, ...]], index: int, tensor: WeightSource, sizes: Any, dim: int = 0
) -> list[StridedRun]:
    """Piece ``index`` of a split tensor. ``sizes``, a number for chunk and a length for split, is not read."""
    dim %= len(tensor.shape)
    offset = sum(math.prod(shape[dim:]) for shape in shapes[:index])
    return [StridedRun(tensor, math.prod(tensor.shape[dim:]), offset, math.prod(shapes[index][dim:]))]


UNCHANGED: Final = {Tensor.detach, Tensor.contiguous}  # same elements in the same row-major order
RULES: Final[dict[Any, Callable[..., list[StridedRun]]]] = {
    torch.cat: _joined_runs,
    torch.stack: _joined_runs,
    torch.chunk: _split_runs,
    torch.split: _split_runs,
}


class LazyBase(Protocol):
    """The weights of a model on meta, by the names that it had before an adapter or an engine changed it."""

    def fill(self, name: str, start: int, out: Tensor) -> None:
        """Fill a contiguous tensor with the elements of a flattened parameter from ``start`` on."""


@final
class LazyTensors:
    """The ``LazyBase`` of a base without quantised weights; every value equals that of ``load_base``, bit for bit.

    ``model``: from ``load_on_meta``, with or without adapters, before an engine replaces its parameters, because their
    sources are attributes of those parameters. Files stay open until this object is freed.
    """

    def __init__(self, folder: Path, model: nn.Module) -> None:
        self._sources: dict[str, WeightSource] = {
            name: source
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if (source := source_of(parameter)) is not None
        }
        self._files = open_base_files(folder)
        self._read = partial(read_stored, self._files)

    def fill(self, name: str, start: int, out: Tensor) -> None:
        """Fill a contiguous tensor of any shape, dtype and device; on the CPU in the stored dtype without a copy.

        Raises BaseModelError: no such parameter, or files that are not those that the model was built from.
        """
        source = self._source(name)
        assert 0 <= start <= start + out.numel() <= math.prod(source.shape), (name, start, out.numel())
        with torch.no_grad():
            source.fill(out.detach().view(-1), start, self._read)

    def read_weight(self, name: str) -> Tensor:
        """Return a full parameter, in its shape, in the dtype of ``load_base``, on the CPU. Errors as ``fill``."""
        return self._source(name).read_full(self._read)

    def _source(self, name: str) -> WeightSource:
        if name not in self._sources:
            raise BaseModelError(f"{self._files.folder}: {name!r} is no parameter that was loaded from here")
        return self._sources[name]


def read_stored(files: BaseFiles, stored: StoredTensor, out: Tensor, start: int) -> None:
    """Fill a flat tensor with elements of a stored tensor, converted to ``stored.dtype``, then to ``out.dtype``."""
    if stored.name not in files.shard_of or files.entry(stored.name).shape != stored.shape:
        raise BaseModelError(f"{files.folder}: {stored.name} is not what it was when the model was built")
    entry = files.entry(stored.name)
    read = partial(files.shard_of[stored.name].read_elements, stored.name)
    direct = out.device.type == "cpu" and out.dtype == stored.dtype
    step = PIECE_BYTES // entry.dtype.itemsize
    with translate_error(PatchError, BaseModelError):  # the files of a base are read as those of a patch
        if direct and out.dtype == entry.dtype:
            read(start, start + len(out), out=out)
            return
        piece = torch.empty(min(step, len(out)), dtype=entry.dtype)
        for first in range(0, len(out), step):
            part = out[first : first + step]
            values = read(start + first, start + first + len(part), out=piece[: len(part)])
            # two conversions, because load_base rounds to stored.dtype first; one would give other bits
            part.copy_(values if direct else values.to(stored.dtype))


def equal_sources(files: BaseFiles, one: WeightSource | None, other: WeightSource | None) -> bool:
    """True if two sources have the same shape and values. They are compared piece by piece."""
    if one is None or other is None or one.shape != other.shape:
        return False
    step = PIECE_BYTES // 8
    size = math.prod(one.shape)
    for start in range(0, size, step):
        pieces = [torch.empty(min(step, size - start), dtype=source.dtype) for source in (one, other)]
        for source, piece in zip((one, other), pieces, strict=True):
            source.fill(piece, start, partial(read_stored, files))
        if not torch.equal(*pieces):
            return False
    return True
