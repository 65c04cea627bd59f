"""One tensor of a merged model: its values some rows at a time, and its lines of the ledger."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lorakit.errors import MergeError, PatchError
from lorakit.files.safetensors import tensor_bytes
from lorakit.lora.merge_weight import Rounding, RowMerger, Update, norm_of_sum, row_blocks, squared_norm
from lorakit.merging.dequantized import dequantized_names, reading
from lorakit.merging.tensors import Contribution, ExpertMerger, OutputTensor
from lorakit.patch.fingerprint import DTYPES, WeightDigest, full_digests, mismatch_message
from lorakit.patch.lazy import LazyTensors

Write = Callable[[memoryview, int], None]
"""(bytes, where in the tensor they belong)"""


def write_piece(piece: OutputTensor, write: Write, *, check_base: bool) -> list[dict[str, Any]]:
    """Compute a tensor and write it; returns one line of the ledger for every part that went in.

    Raises:
        MergeError: a value does not fit the dtype. PatchError: the base is not the one a patch was trained on.
    """
    shape = (piece.shape[0] if piece.shape else 1, math.prod(piece.shape[1:]))
    wholes = _Wholes(piece, shape)
    stacked = bool(piece.updates) and piece.updates[0].stacked
    updates = [] if stacked else [part.update() for part in piece.updates]
    merge: ExpertMerger | RowMerger | None = ExpertMerger(piece.updates, piece.shape) if stacked else None
    if piece.kind and updates:
        merge = RowMerger(piece.kind, updates)
    measured = bool(wholes.parts) or stacked or not all(update.additive for update in updates)
    checks = _BaseChecks(piece if check_base else None)
    rounding, change, lost = Rounding(piece.dtype), 0.0, 0.0
    changed = wholes.resized
    with reading(piece.file) as reader:
        for rows in row_blocks(shape, whole=merge is not None and merge.needs_all_rows):
            start, stop = rows.start * shape[1], rows.stop * shape[1]
            before = (
                None
                if wholes.resized
                else reader.elements(piece.stored, start, stop).view(rows.stop - rows.start, shape[1])
            )
            if before is not None:
                checks.add(before)
            exact = wholes.rows(before, rows)
            if merge is not None:
                exact = merge(exact, rows)
            if measured and before is not None:  # without them it is known from the factors
                change += squared_norm(exact - before)
            rounded = rounding(exact)
            lost += (block := rounding.rounding_error(exact, rounded))
            write(tensor_bytes(rounded), start * piece.dtype.itemsize)
            if before is not None and not changed:
                changed = not torch.equal(rounded, rounding(before.double()))
            if not math.isfinite(block):
                _check_finite(piece, before, rounded)
    checks.compare()
    if not measured and updates:
        change = norm_of_sum(updates) ** 2
    told = {
        "changed": changed, "norm_of_rounding": math.sqrt(lost),
        "lost_to_rounding": math.sqrt(lost / change) if change else 0.0,
    }  # fmt: skip
    parts = [("parameter", part) for part in piece.wholes] + [("layer", part) for part in piece.updates]
    norms = [*wholes.norms(), *(_norm(number, updates, merge) for number in range(len(piece.updates)))]
    return [
        {"patch": part.of.number, what: part.place, "tensor": piece.name, "norm_of_change": norm, **told}
        for (what, part), norm in zip(parts, norms, strict=True)
    ]


def _norm(number: int, updates: Sequence[Update], merge: RowMerger | ExpertMerger | None) -> float:
    """How much an update changes the tensor by itself."""
    if updates and updates[number].additive:
        return norm_of_sum([updates[number]])
    return 0.0 if merge is None else math.sqrt(merge.squares[number])


def _check_finite(piece: OutputTensor, before: Tensor | None, rounded: Tensor) -> None:
    """Only what the base itself holds may be infinite, where nothing is added to it.

    Raises:
        MergeError: a value is not finite.
    """
    if (
        not (piece.updates or piece.wholes)
        and before is not None
        and torch.equal(before.isfinite(), rounded.isfinite())
    ):
        return
    if before is not None and not before.isfinite().all():
        raise MergeError(f"{piece.stored}: the base holds values that are not finite; nothing was written")
    raise MergeError(f"{piece.name}: the merged values do not fit {piece.dtype}; nothing was written")


@dataclass
class _Wholes:
    """The rows a tensor starts from: the base's, with the whole tensors of patches in their place."""

    piece: OutputTensor
    shape: tuple[int, int]
    squares: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parts = [(part, part.of.patch.full_tensors) for part in self.piece.wholes]
        self.squares = [0.0] * len(self.parts)
        self._wide = torch.empty(0, dtype=torch.float64)
        self.resized = self.piece.file.entries[self.piece.stored].shape != self.piece.shape

    def rows(self, before: Tensor | None, rows: slice) -> Tensor:
        """Some rows in float64, in memory of their own."""
        if not self.parts:
            assert before is not None
            return self._widened(before)
        if before is None:
            new = self._part(0, rows).to(torch.float64, copy=True)
            self.squares[0] += squared_norm(new)  # of all of it: there is nothing of its shape to compare with
            return new
        total = before.to(torch.float64, copy=True)
        for number, (part, _) in enumerate(self.parts):
            new = self._part(number, rows).double()
            difference = new - before.double()
            self.squares[number] += squared_norm(difference)
            total += part.of.weight * difference
        # one whole tensor with weight 1 is itself: W0 + (W - W0) could round
        return new if len(self.parts) == 1 and self.parts[0][0].of.weight == 1.0 else total

    def _part(self, number: int, rows: slice) -> Tensor:
        """Some rows of a whole tensor, read now."""
        part, whole = self.parts[number]
        elements = rows.start * self.shape[1], rows.stop * self.shape[1]
        if isinstance(whole, LazyTensors):
            return whole.elements(part.place, *elements).view(rows.stop - rows.start, self.shape[1])
        return whole[part.place].reshape(self.shape)[rows]

    def _widened(self, block: Tensor) -> Tensor:
        # in memory that is used again and again: touching new memory costs as much as the conversion
        if self._wide.numel() < block.numel():
            self._wide = torch.empty(block.numel(), dtype=torch.float64)
        return self._wide[: block.numel()].view_as(block).copy_(block)

    def norms(self) -> list[float]:
        """How far each whole tensor is from the base's, times its weight."""
        return [
            abs(part.of.weight) * math.sqrt(square) for (part, _), square in zip(self.parts, self.squares, strict=True)
        ]


class _BaseChecks:
    """Is the touched tensor, value for value, what the patches were trained on?"""

    def __init__(self, piece: OutputTensor | None) -> None:
        self._piece = piece
        self._digests: dict[str | None, WeightDigest] = {}
        self._told: list[tuple[Contribution, str, str | None]] = []
        resized = piece is not None and (
            piece.file.entries[piece.stored].shape != piece.shape or piece.stored in dequantized_names(piece.file)
        )
        for part in piece.updates if piece and not resized else ():
            told = full_digests(part.of.patch)
            if piece is not None and told and part.place in told and part.expert is None:
                rounded_to = part.of.patch.metadata["base"].get("rounded_to")
                self._told.append((part, told[part.place], rounded_to))
                self._digests.setdefault(rounded_to, WeightDigest(piece.file.entries[piece.stored].shape))

    def add(self, before: Tensor) -> None:
        for rounded_to, digest in self._digests.items():
            digest.update(before.to(DTYPES.get(rounded_to or "", before.dtype)))

    def compare(self) -> None:
        found = {rounded_to: digest.hexdigest() for rounded_to, digest in self._digests.items()}
        for part, told, rounded_to in self._told:
            if found[rounded_to] != told and self._piece is not None:
                raise PatchError(
                    mismatch_message(part.of.patch, self._piece.file.path.parent, f"values of {part.place}")
                )
