"""Read any part of a base's parameters from its files, when that part is needed.

Invariant: reading a range takes the memory of the range and of one piece, and maps no file. Only a ``Recomputed``
parameter takes the memory of the full parameter, one parameter at a time.
"""

import math
from functools import partial
from pathlib import Path
from typing import Final, Protocol, final

import torch
from torch import Tensor, nn

from lorakit.base.provenance import StoredTensor, WeightSource, source_of
from lorakit.errors import BaseModelError, PatchError, translate_error
from lorakit.files.base_files import BaseFiles, open_base_files

PIECE_BYTES: Final = 1 << 24


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
