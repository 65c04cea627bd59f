"""One micro-batch: made by data/, computed by an engine."""

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

IGNORE_INDEX: Final = -100  # label of a position without loss, as torch's cross-entropy has it


@dataclass(frozen=True)
class Batch:
    """One micro-batch, in one of two layouts.

    Packed: one line with all rows end to end, without padding and attention mask. ``position_ids`` restart at each row.
    Padded: one line per row, padded on the right, with an attention mask.
    """

    input_ids: Tensor  # (lines, width) int64
    labels: Tensor  # (lines, width) int64, shifted: position t has the token that follows token t, or IGNORE_INDEX
    position_ids: Tensor  # (lines, width) int64: index of each token in its row
    attention_mask: Tensor | None
    """(lines, width) int64: 1 for a token, 0 for padding, and for the number of a label; None: packed"""
    row_indices: tuple[int, ...]  # index of each row in its data set
    num_tokens: int  # tokens of all rows, without padding
    row_labels: tuple[int, ...]  # label tokens of each row; of a part of a line, those in the part
    row_weights: Tensor  # (rows,) float32: weight of each row's loss
    row_lengths: tuple[int, ...] = ()  # packed: tokens of each row on the line, in its order; padded: empty
    token_weights: Tensor | None = None
    """(lines, width) float32, shifted as ``labels``: weight of each label, its own times its row's; None: its row's"""
    label_positions: Tensor | None = None  # indices of labels in the flattened ``labels``; None before ``to``
    label_weights: Tensor | None = None  # (labels,) float32: its own weight times its row's; None before ``to``
    source: str | None = None  # name of its rows' source, where held-out losses are by source
    start: int | None = None
    """of a part of a packed line: its first token's index in the line, which ``row_lengths`` speak of; None: no part"""
    row_references: Tensor | None = None  # (rows,) float32: log p of each row's labels at the run's start
    teacher: tuple[Tensor, Tensor] | None = None
    """of each label, the teacher's likeliest tokens and their log p, as of `TeacherTable`; None without a teacher"""
    mismatched: "Batch | None" = None  # the prompts of as many rows with others' answers, for an objective's first pass
    row_shared: tuple[int, ...] = ()  # packed: tokens of each row before its own, as of `RowLengths`; empty: none

    @property
    def num_label_tokens(self) -> int:
        return sum(self.row_labels)

    def sum_of_weights(self) -> float:
        """Return the sum of all labels' weights, by which the loss is divided. Call it on the host, before ``to``."""
        if self.token_weights is not None:
            return float(self.token_weights[self.labels != IGNORE_INDEX].double().sum())
        return float(self.row_weights.double() @ torch.tensor(self.row_labels, dtype=torch.float64))

    def rows_of_tokens(self) -> Tensor:
        """Return the place in `row_indices` of each token's row, (lines * width,) int64."""
        lines, width = self.input_ids.shape
        lengths = torch.tensor(self.row_lengths or [width] * lines)
        rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        return rows if self.start is None else rows[self.start : self.start + width]

    def lengths_of_tokens(self) -> Tensor:
        """Return the number of tokens, without padding, of each token's row, (lines * width,) int64."""
        lines, width = self.input_ids.shape
        padded = torch.full((lines,), width) if self.attention_mask is None else self.attention_mask.sum(1)
        lengths = torch.tensor(self.row_lengths) if self.row_lengths else padded
        return lengths[self.rows_of_tokens()]

    def tokens_of_rows(self) -> list[bytes]:
        """Return the token ids of each row, as bytes. Call it on the host, of full rows."""
        assert not self.row_shared
        rows: Any = self.input_ids[0].split(self.row_lengths) if self.row_lengths else ()
        if self.attention_mask is not None:
            rows = (ids[mask == 1] for ids, mask in zip(self.input_ids, self.attention_mask, strict=True))
        return [row.numpy().tobytes() for row in rows][: len(self.row_indices)]

    def part(self, start: int, stop: int) -> "Batch":
        """Return the tokens of a packed line from ``start`` to ``stop``, with their labels and counts."""
        teacher = self.teacher
        if teacher is not None:
            first = int((self.labels[:, :start] != IGNORE_INDEX).sum())
            own = slice(first, first + int((self.labels[:, start:stop] != IGNORE_INDEX).sum()))
            teacher = teacher[0][own], teacher[1][own]
        part = replace(
            self,
            input_ids=self.input_ids[:, start:stop],
            labels=self.labels[:, start:stop],
            position_ids=self.position_ids[:, start:stop],
            token_weights=None if self.token_weights is None else self.token_weights[:, start:stop],
            teacher=teacher,
            start=start,
            num_tokens=min(stop, self.num_tokens) - min(start, self.num_tokens),
        )
        rows = part.rows_of_tokens()[part.labels.flatten() != IGNORE_INDEX]
        return replace(part, row_labels=tuple(torch.bincount(rows, minlength=len(self.row_labels)).tolist()))

    def with_tokens(self, number: int) -> "Batch":
        """Return a packed line with at least so many tokens; those that it lacks become a row without labels."""
        missing = number - self.input_ids.shape[1]
        if missing <= 0:
            return self
        zeros = torch.zeros(1, missing, dtype=torch.int64)
        weights = self.token_weights
        return replace(
            self, input_ids=torch.cat([self.input_ids, zeros], 1),
            labels=torch.cat([self.labels, torch.full_like(zeros, IGNORE_INDEX)], 1),
            position_ids=torch.cat([self.position_ids, torch.arange(missing)[None]], 1),
            token_weights=None if weights is None else torch.cat([weights, torch.ones(1, missing)], 1),
            row_lengths=(*self.row_lengths, missing),
        )  # fmt: skip

    def to(self, device: torch.device) -> "Batch":
        """Return the same micro-batch on a device, with ``label_positions`` and the weights of labels."""
        # on the host, because nonzero on a GPU waits for the device to know the size of its result
        positions = torch.nonzero(self.labels.flatten() != IGNORE_INDEX)[:, 0]
        weights = self.row_weights.repeat_interleave(torch.tensor(self.row_labels, dtype=torch.int64))
        if self.token_weights is not None:
            weights = self.token_weights.flatten()[positions]
        batch = replace(self, label_positions=positions, label_weights=weights)
        tensors = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
        moved: dict[str, Any] = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        if batch.teacher is not None:
            moved["teacher"] = tuple(tensor.to(device, non_blocking=True) for tensor in batch.teacher)
        return replace(batch, **moved)
