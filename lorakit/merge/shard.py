"""Write one file of a merged model. What no patch touches is copied by range; the rest passes through some rows at a
time, each value the float64 sum rounded once."""

import errno
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor

from lorakit.errors import MergeError, PatchError
from lorakit.lora.merging import BLOCK_ELEMENTS, Block, merged_blocks
from lorakit.merge.plan import Part, Piece
from lorakit.patch.fingerprint import DTYPES, WeightDigest, other_base, told_in_full
from lorakit.patch.tensor_file import framed, header_bytes, tensor_bytes

COPY_BYTES: Final = 1 << 26
NO_COPY_RANGE: Final = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


def write_shard(path: Path, pieces: list[Piece], *, check_base: bool) -> list[dict[str, Any]]:
    """Write the pieces as a safetensors file; returns the ledger's lines, one for every part that went in.

    ``check_base``: compare every value of the touched tensors with the digests that the patches hold.

    Raises:
        MergeError: a merged value does not fit its dtype. PatchError: the base is not the patch's.
    """
    lines: list[dict[str, Any]] = []
    with open(path, "wb") as target, open(pieces[0].file.path, "rb") as source:
        target.write(_header(pieces))
        for copied, group in groupby(pieces, key=lambda piece: piece.copied and piece.file is pieces[0].file):
            if copied:
                for start, count in _ranges(list(group)):
                    copy_range(source, target, start, count)
                continue
            for piece in group:
                lines += _write_piece(piece, target, check_base)
    return lines


def _header(pieces: list[Piece]) -> bytes:
    """The base's own header where nothing in it changes."""
    file = pieces[0].file
    told = {name: (entry.dtype, entry.shape) for name, entry in file.entries.items()}
    planned = {piece.name: (piece.dtype, piece.shape) for piece in pieces}
    return framed(file.header) if told == planned else header_bytes(planned, file.metadata)


def _ranges(pieces: list[Piece]) -> Iterator[tuple[int, int]]:
    """(start, bytes) in the source of neighbouring tensors, joined."""
    start = end = None
    for entry in (piece.file.entries[piece.stored] for piece in pieces):
        if start is not None and entry.start == end:
            end = entry.end
            continue
        if start is not None and end is not None:
            yield start, end - start
        start, end = entry.start, entry.end
    if start is not None and end is not None:
        yield start, end - start


def copy_range(source: BinaryIO, target: BinaryIO, start: int, count: int) -> None:
    """Copy bytes from one file to the end of another, inside the kernel where it can, sharing blocks where it may.

    Raises:
        MergeError: the source ended before that.
    """
    target.flush()
    while count:
        try:
            copied = os.copy_file_range(source.fileno(), target.fileno(), min(count, COPY_BYTES), start)
        except OSError as problem:
            if problem.errno not in NO_COPY_RANGE:
                raise
            copied = os.sendfile(target.fileno(), source.fileno(), start, min(count, COPY_BYTES))
        if not copied:
            raise MergeError(f"{source.name}: the file became shorter while it was read")
        start, count = start + copied, count - copied
    target.seek(0, os.SEEK_END)


def _write_piece(piece: Piece, target: BinaryIO, check_base: bool) -> list[dict[str, Any]]:
    sums, checks = _Sums(), _BaseChecks(piece if check_base else None)
    for block in _blocks(piece, sums):
        rounded = block.exact.to(piece.dtype)
        if not rounded.isfinite().all():
            raise MergeError(f"{piece.name}: the merged values do not fit {piece.dtype}; nothing was written")
        target.write(tensor_bytes(rounded))
        if piece.updates or piece.wholes:
            sums.add(block, rounded)
            checks.add(block.before)
    checks.compare()
    return [_line(piece, part, sums) for part in (*piece.wholes, *piece.updates)]


@dataclass
class _Sums:
    """Squared norms over a whole tensor, for the ledger."""

    change: float = 0.0
    lost: float = 0.0
    wholes: dict[int, float] = field(default_factory=dict)

    def add(self, block: Block, rounded: Tensor) -> None:
        if block.before.shape == block.exact.shape:
            self.change += float(torch.linalg.vector_norm(block.exact - block.before).square())
        self.lost += float(torch.linalg.vector_norm(block.exact - rounded).square())


def _blocks(piece: Piece, sums: _Sums) -> Iterator[Block]:
    """The piece in blocks of rows: whole tensors first, updates onto them."""
    shape = (piece.shape[0] if piece.shape else 1, math.prod(piece.shape[1:]))
    stored, wholes = piece.file, [(part, part.of.patch.whole[part.place]) for part in piece.wholes]
    resized = piece.file.entries[piece.stored].shape != piece.shape
    before: list[Tensor] = []

    def read(rows: slice) -> Tensor:
        elements = rows.start * shape[1], rows.stop * shape[1]
        if resized:
            before[:] = [torch.empty(0, shape[1])]
        else:
            before[:] = [stored.read_elements(piece.stored, *elements).reshape(-1, shape[1])]
        total: Tensor = before[0]
        for number, (part, tensor) in enumerate(wholes):
            own = tensor.reshape(-1)[elements[0] : elements[1]].reshape(-1, shape[1])
            if not resized:
                difference = own.double() - before[0].double()
                sums.wholes[number] = sums.wholes.get(number, 0.0) + float(difference.square().sum())
            alone = part.of.weight == 1.0 and len(wholes) == 1
            total = own if alone else total.double() + part.of.weight * difference
        return total

    if piece.updates:
        assert piece.kind is not None
        blocks = merged_blocks(read, shape, piece.kind, [part.update() for part in piece.updates])
    else:
        num_rows = max(1, BLOCK_ELEMENTS // max(1, shape[1]))
        slices = (slice(at, min(at + num_rows, shape[0])) for at in range(0, shape[0], num_rows))
        blocks = (Block(rows, W := read(rows), W) for rows in slices)
    for block in blocks:
        yield Block(block.rows, before[0], block.exact)


class _BaseChecks:
    """Is the touched tensor, value for value, what the patches were trained on?"""

    def __init__(self, piece: Piece | None) -> None:
        self._piece = piece
        self._digests: dict[str | None, WeightDigest] = {}
        self._told: list[tuple[Part, str, str | None]] = []
        for part in piece.updates if piece else ():
            told = told_in_full(part.of.patch)
            if piece is not None and told and part.place in told:
                rounded_to = part.of.patch.facts["base"].get("rounded_to")
                self._told.append((part, told[part.place], rounded_to))
                self._digests.setdefault(rounded_to, WeightDigest(piece.file.entries[piece.stored].shape))

    def add(self, before: Tensor) -> None:
        for rounded_to, digest in self._digests.items():
            digest.update(before.to(DTYPES.get(rounded_to or "", before.dtype)))

    def compare(self) -> None:
        found = {rounded_to: digest.hexdigest() for rounded_to, digest in self._digests.items()}
        for part, told, rounded_to in self._told:
            if found[rounded_to] != told and self._piece is not None:
                raise PatchError(other_base(part.of.patch, self._piece.file.path.parent, f"values of {part.place}"))


def _line(piece: Piece, part: Part, sums: _Sums) -> dict[str, Any]:
    """One line of the ledger. Rounding is the tensor's, so parts that share a tensor share what was lost."""
    if part in piece.updates:
        update = part.update()
        A, B = update.tensors["lora_A"].double(), update.tensors["lora_B"].double()
        norm = abs(update.scale) * math.sqrt(max(0.0, float(((B.T @ B) * (A @ A.T)).sum())))
        what: Mapping[str, Any] = {"layer": part.place}
    else:
        norm = abs(part.of.weight) * math.sqrt(sums.wholes.get(piece.wholes.index(part), 0.0))
        what = {"parameter": part.place}
    return {
        "patch": part.of.number, **what, "tensor": piece.name, "norm_of_change": norm,
        "norm_of_rounding": math.sqrt(sums.lost),
        "lost_to_rounding": math.sqrt(sums.lost / sums.change) if sums.change else 0.0,
    }  # fmt: skip
