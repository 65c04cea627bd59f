"""Write one file of a merged model. What no patch touches is copied by range; the rest is computed, several tensors
at a time, each into its own place."""

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch

from lorakit.errors import MergeError
from lorakit.files.safetensors import SafetensorsFile, header_bytes, with_length_prefix
from lorakit.merging.piece import write_piece
from lorakit.merging.tensors import OutputTensor

COPY_BYTES: Final = 1 << 26
MAX_WORKERS: Final = 4
NO_COPY_RANGE: Final = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


def write_shard(
    path: Path, file: SafetensorsFile, pieces: list[OutputTensor], *, check_base: bool
) -> list[dict[str, Any]]:
    """Write the pieces as a safetensors file; returns the ledger's lines, one for every part that went in.

    ``file``: the base's file that this one follows. ``check_base``: compare every value of the touched tensors with
    the digests that the patches hold.

    Raises:
        MergeError: a merged value does not fit its dtype. PatchError: the base is not the patch's.
    """
    header = _header(file, pieces)
    places = _places(pieces, len(header))
    copied = [(piece, at) for piece, at in places if piece.copied and piece.file is file]
    computed = [(piece, at) for piece, at in places if not (piece.copied and piece.file is file)]
    with open(path, "wb") as target, open(file.path, "rb") as source:
        target.write(header)
        target.flush()
        for start, count, at in _ranges(copied):
            copy_range(source.fileno(), target.fileno(), start, count, at)

        def compute(place: tuple[OutputTensor, int]) -> list[dict[str, Any]]:
            piece, at = place
            return write_piece(
                piece, lambda content, offset: _write_all(target.fileno(), content, at + offset), check_base=check_base
            )

        # one thread per tensor: the blocks are too small to share one among threads
        workers = min(MAX_WORKERS, torch.get_num_threads())
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            lines = [line for found in pool.map(compute, computed) for line in found]
    return lines


def copy_range(source: int, target: int, start: int, count: int, at: int) -> None:
    """Copy ``count`` bytes between two open files, inside the kernel where it can, sharing blocks where it may.

    Raises:
        MergeError: the source ended before that.
    """
    while count:
        try:
            copied = os.copy_file_range(source, target, min(count, COPY_BYTES), start, at)
        except OSError as problem:
            if problem.errno not in NO_COPY_RANGE:
                raise
            copied = os.pwrite(target, os.pread(source, min(count, COPY_BYTES), start), at)
        if not copied:
            raise MergeError("the base's files became shorter while they were read")
        start, at, count = start + copied, at + copied, count - copied


def _write_all(target: int, content: memoryview, at: int) -> None:
    while content:
        written = os.pwrite(target, content, at)
        content, at = content[written:], at + written


def _header(file: SafetensorsFile, pieces: list[OutputTensor]) -> bytes:
    """The base's own header where nothing in it changes."""
    told = {name: (entry.dtype, entry.shape) for name, entry in file.entries.items()}
    planned = {piece.name: (piece.dtype, piece.shape) for piece in pieces}
    return with_length_prefix(file.header) if file.header and told == planned else header_bytes(planned, file.metadata)


def _places(pieces: list[OutputTensor], position: int) -> list[tuple[OutputTensor, int]]:
    """Where each piece begins in the file."""
    places = []
    for piece in pieces:
        places.append((piece, position))
        position += torch.Size(piece.shape).numel() * piece.dtype.itemsize
    return places


def _ranges(copied: list[tuple[OutputTensor, int]]) -> Iterator[tuple[int, int, int]]:
    """(start in the source, bytes, start in the target), neighbours joined."""
    run: tuple[int, int, int] | None = None
    for piece, at in copied:
        entry = piece.file.entries[piece.stored]
        if run is not None and run[0] + run[1] == entry.start and run[2] + run[1] == at:
            run = (run[0], run[1] + entry.end - entry.start, run[2])
            continue
        if run is not None:
            yield run
        run = (entry.start, entry.end - entry.start, at)
    if run is not None:
        yield run
