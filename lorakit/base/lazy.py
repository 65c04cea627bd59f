"""A base loaded by ranges: a model without weights, and any part of any of its parameters, read from the files.

transformers itself builds the model, from stand-ins for the stored tensors that hold no data (origin.py). So names,
dtypes, tied weights and missing tensors are as in ``load_base``, and every parameter knows its origin.

Invariant: reading a range takes the memory of the range and of one piece, and maps no file. Only a parameter that is
``Computed`` from stored ones takes that of the whole parameter, one at a time.
"""

import math
import os
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lorakit.base.meta import ELSEWHERE, build_from_placeholders, tied_names
from lorakit.base.provenance import ORIGIN, StoredTensor, TracedTensor, WeightSource, origin_of, traced
from lorakit.errors import BaseModelError
from lorakit.files.base_files import INDEX, SINGLE, BaseFiles, open_base_files
from lorakit.files.safetensors import TensorEntry

PIECE_BYTES: Final = 1 << 24


def load_on_meta(folder: Path, dtype: torch.dtype, promised: Mapping[str, TensorEntry] | None = None) -> nn.Module:
    """``load_base`` without the weights: every parameter on the meta device, every buffer real and on the CPU.

    ``promised``: what the files would hold if nothing in them were packed.

    Raises:
        BaseModelError: as ``load_base``; and for a parameter whose origin is not known.
    """
    files = open_base_files(folder)
    with _MissingStaysEmpty():
        entries = promised or {name: files.entry(name) for name in files.shard_of}
        stand_ins = {name: _PlaceholderTensor(name, entry) for name, entry in entries.items()}
        model, report = build_from_placeholders(folder, dtype, stand_ins, packed=promised is not None)
    _check_complete(files, model, report)
    shards = _Shards(files)
    with torch.no_grad():
        _fill_buffers(model, shards)
        _tie_equals(model, shards)
        _keep_origins(files, model)
    return model.eval()


@final
class LazyTensors:
    """The tensors of a base by the names of a model from ``load_on_meta``, before or after adapters were attached.

    Values are those of ``load_base``, bit for bit. Make this before an engine replaces the model's parameters; it
    does not hold the model. Files stay open until it is let go.

    Raises:
        BaseModelError: the files are not those that the model was built from.
    """

    def __init__(self, folder: Path, model: nn.Module) -> None:
        self._origins: dict[str, WeightSource] = {
            name: vars(parameter)[ORIGIN]
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if ORIGIN in vars(parameter)
        }
        self._shards = _Shards(open_base_files(folder))
        self._shards.check(leaf for origin in self._origins.values() for leaf in origin.leaves())

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of a flattened parameter, in the dtype of ``load_base``, on the CPU.

        Raises:
            BaseModelError: no such parameter, or a file that can no longer be read.
        """
        tensor = torch.empty(stop - start, dtype=self._origin(name).dtype)
        self.read_into(name, start, tensor)
        return tensor

    def read_into(self, name: str, start: int, tensor: Tensor) -> None:
        """Fill a contiguous tensor of any shape, dtype and device with a parameter's elements from ``start`` on.

        They are read straight into it when it is on the CPU and has the stored dtype. Errors as ``read``.
        """
        origin = self._origin(name)
        size = math.prod(origin.shape)
        if not 0 <= start <= start + tensor.numel() <= size:
            raise ValueError(f"{name} has {size} elements; asked for {start} to {start + tensor.numel()}")
        with torch.no_grad():
            origin.fill(tensor.detach().view(-1), start, self._shards.fill)

    def _origin(self, name: str) -> WeightSource:
        if name not in self._origins:
            raise BaseModelError(f"{self._shards.files.folder}: {name!r} is no parameter that was loaded from here")
        return self._origins[name]


@final
class _Shards:
    """The files of a base, opened when they are first read."""

    def __init__(self, files: BaseFiles) -> None:
        self.files = files
        self._handles: dict[Path, int] = {}
        self._closing = weakref.finalize(self, _close, self._handles)

    def check(self, leaves: Iterable[StoredTensor]) -> None:
        for leaf in leaves:
            if leaf.name not in self.files.shard_of or self.files.entry(leaf.name).shape != leaf.shape:
                raise BaseModelError(f"{self.files.folder}: {leaf.name} is not what it was when the model was built")

    def fill(self, stored: StoredTensor, out: Tensor, start: int) -> None:
        """Fill a flat tensor with elements of a stored one, converted to the dtype it is loaded in, then to out's."""
        entry = self.files.entry(stored.name)
        here = out.device.type == "cpu" and out.dtype == stored.dtype
        if here and out.dtype == entry.dtype:
            self._read(stored.name, entry, start, out)
            return
        step = PIECE_BYTES // entry.dtype.itemsize
        piece = torch.empty(min(step, len(out)), dtype=entry.dtype)
        for first in range(0, len(out), step):
            part = out[first : first + step]
            self._read(stored.name, entry, start + first, piece[: len(part)])
            part.copy_(piece[: len(part)] if here else piece[: len(part)].to(stored.dtype))

    def _read(self, name: str, entry: TensorEntry, start: int, out: Tensor) -> None:
        path, done = self.files.shard_of[name].path, 0
        view: memoryview = out.view(torch.uint8).numpy().data if len(out) else memoryview(b"")
        try:
            if path not in self._handles:
                self._handles[path] = os.open(path, os.O_RDONLY)
            while done < len(view):  # one call reads 2 GiB at most
                position = entry.start + start * entry.dtype.itemsize + done
                count = os.preadv(self._handles[path], [view[done:]], position)
                if not count:
                    raise BaseModelError(f"{path}: the file ended while {name} was read")
                done += count
        except OSError as problem:
            raise BaseModelError(f"{path}: {name} cannot be read: {problem.strerror}") from None


@final
class _PlaceholderTensor:
    """A stored tensor as transformers meets it: it takes all of it and says in which dtype; nothing is read."""

    def __init__(self, name: str, entry: TensorEntry) -> None:
        self._name, self._entry = name, entry

    def __getitem__(self, which: Any) -> "_PlaceholderTensor":
        assert which is Ellipsis, which
        return self

    def to(self, device: object = None, dtype: torch.dtype | None = None) -> TracedTensor:
        return traced(StoredTensor(self._entry.shape, dtype or self._entry.dtype, self._name))


class _MissingStaysEmpty(TorchFunctionMode):
    """Parameters that the files do not hold stay on the meta device: they are reported, not drawn at random."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty_like and isinstance(args[0], nn.Parameter):
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def _close(handles: Mapping[Path, int]) -> None:
    for handle in handles.values():
        os.close(handle)


def _check_complete(files: BaseFiles, model: nn.Module, report: Mapping[str, Any]) -> None:
    problems = [f"{name} is missing" for name in sorted(report["missing_keys"])]
    for name, found, expected in sorted(report["mismatched_keys"]):
        holder = files.shard_of.get(name)
        place = f" in {holder.path.name}" if holder else ""
        problems.append(f"{name}{place} is {tuple(found)} instead of {tuple(expected)}")
    if problems:
        index = files.folder / INDEX
        raise BaseModelError(
            f"{index if index.is_file() else files.folder / SINGLE}: {len(problems)} tensors of"
            f" {type(model).__name__} are missing or of another shape and would be random: {'; '.join(problems[:5])}"
        )


def _fill_buffers(model: nn.Module, shards: _Shards) -> None:
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        if not buffer.is_meta:
            continue
        origin = origin_of(buffer)
        if origin is None:
            raise _unreadable(shards.files, name)
        module, _, key = name.rpartition(".")
        model.get_submodule(module)._buffers[key] = origin.whole(shards.fill)


def _tie_equals(model: nn.Module, shards: _Shards) -> None:
    """Tie what the config ties and the files hold twice, if both are equal: transformers has no values to compare."""
    names, parameters = tied_names(model), dict(model.named_parameters(remove_duplicate=False))
    for target, source in list(names.items()):
        one, other = parameters.get(target), parameters.get(source)
        if one is other or one is None or other is None:
            continue
        if _equal(origin_of(one), origin_of(other), shards):
            _put(model, target, other)
        else:
            names.pop(target)


def _equal(one: WeightSource | None, other: WeightSource | None, shards: _Shards) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return False
    step, size = PIECE_BYTES // 8, math.prod(one.shape)
    for start in range(0, size, step):
        pieces = [torch.empty(min(step, size - start), dtype=origin.dtype) for origin in (one, other)]
        for origin, piece in zip((one, other), pieces, strict=True):
            origin.fill(piece, start, shards.fill)
        if not torch.equal(*pieces):
            return False
    return True


def _keep_origins(files: BaseFiles, model: nn.Module) -> None:
    """Plain parameters in place of the traced ones; one that hangs in several places stays one."""
    plain: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) not in plain:
            origin = origin_of(parameter)
            if origin is None:
                raise _unreadable(files, name)
            made = nn.Parameter(torch.empty(origin.shape, dtype=origin.dtype, device="meta"), parameter.requires_grad)
            vars(made).update(vars(parameter))  # the origin, and what transformers noted
            plain[id(parameter)] = made
        _put(model, name, plain[id(parameter)])


def _put(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module, _, key = name.rpartition(".")
    setattr(model.get_submodule(module), key, parameter)


def _unreadable(files: BaseFiles, name: str) -> BaseModelError:
    return BaseModelError(f"{files.folder}: {name} is not put together from stored tensors in a known way; {ELSEWHERE}")
