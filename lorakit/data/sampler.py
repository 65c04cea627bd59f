"""Choose the rows of each step, and collate them to the tensors of micro-batches.

Invariant: the rows of a step are a pure function of (seed, epoch, step). No state is saved, so a resumed run computes
with the same rows as an uninterrupted one. Packing changes the layout of a step, never its rows (decision 0003).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lorakit.data.batch import IGNORE_INDEX, Batch
from lorakit.data.dataset import TeacherTable, TokenDataset
from lorakit.data.row_counts import CHANGES
from lorakit.errors import DataError

LEAST_SHARED: Final = 8  # tokens
NOT_ONE_TO_ONE: Final = ({"eval_rows"} | CHANGES.keys()) - {"truncated"}
"""counts of rows by which the rows of a run are others than those of its files"""


@dataclass(frozen=True)
class BatchSampler:
    """The micro-batches of every step of a run, for one rank."""

    rows: TokenDataset
    batch_size: int  # rows of a step, over all ranks
    micro_batch_size: int  # rows of a micro-batch, at most
    packing: bool
    seed: int
    rank: int = 0
    num_ranks: int = 1
    group_size: int = 1  # neighbouring rows that stay together in a micro-batch, for the objective; pairs always do
    references: np.ndarray | None = None  # log p of each row's labels at the run's start, (rows,) float32
    teacher: TeacherTable | None = None
    shares_prompts: bool = False  # a packed line has the tokens that rows of a group begin with once
    mismatched: "BatchSampler | None" = None  # of the same rows with others' answers, for an objective's first pass
    _order: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)
    """cache: epoch -> its order of rows, for one epoch"""

    def __post_init__(self) -> None:
        """Raise DataError unless every group of rows is complete, and fits into steps and micro-batches."""
        if self.group_size in (1, self.rows.group_size):
            return
        for key in ("batch_size", "micro_batch_size"):
            if (value := getattr(self, key)) % self.group_size:
                raise DataError(f"train.{key}: the objective reads rows in groups of {self.group_size}, got {value}")
        # because a row that is left out would shift all later groups, without an error
        is_shifted = any(getattr(self.rows.counts, name) for name in NOT_ONE_TO_ONE)
        if is_shifted or any(len(part.table) % self.group_size or part.passes != 1 for part in self.rows.parts):
            raise DataError(
                f"data: the objective reads rows in groups of {self.group_size}, so each source has a multiple of as"
                " many, all of which are rows of the run: none left out, cut, joined or held out, no weights of sources"
            )

    @property
    def rows_per_group(self) -> int:
        """Neighbouring rows that stay together, for the objective or as a row of a file becomes several."""
        return max(self.group_size, self.rows.group_size)

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.rows.rows_per_epoch / self.batch_size)

    def step(self, step: int) -> list[Batch]:
        """Return this rank's micro-batches of a step (counted from 0)."""
        return self.micro_batches(self.rows_of_step(step))

    def rows_of_step(self, step: int) -> list[int]:
        """Return the indices of a step's rows, over all ranks. An epoch's last step may have fewer rows."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch not in self._order:
            self._order.clear()
            groups = self._groups(self.rows.rows_of_epoch(self.seed, epoch))
            order = np.random.Generator(np.random.Philox(key=[self.seed, epoch])).permutation(len(groups))
            self._order[epoch] = groups[order].ravel()
        return list(map(int, self._order[epoch][index * self.batch_size : (index + 1) * self.batch_size]))

    def eval_batches(self) -> list[list[int]]:
        """Return the indices of all rows, in micro-batches of one source and of similar length, for evaluation."""
        lengths, size = self.rows.lengths, self.micro_batch_size
        parts = [self._groups(self.rows.rows_of_part(index)) for index in range(len(self.rows.parts))]
        orders = [groups[np.argsort(lengths[groups].max(1), kind="stable")].ravel() for groups in parts]
        return [order[i : i + size].tolist() for order in orders for i in range(0, len(order), size)]

    def micro_batches(self, row_indices: list[int]) -> list[Batch]:
        """Return this rank's micro-batches of a step.

        Every rank gets equally many, because collectives must run in step: one without rows gets one without labels,
        rows and counts.
        """
        parts = self.cut(row_indices)
        own = parts[self.rank :: self.num_ranks]
        group = self.rows_per_group if self.shares_prompts else 1
        batches = [
            collate(self.rows, part, packing=self.packing, references=self.references, group=group) for part in own
        ]
        if self.teacher is not None:
            batches = [replace(batch, teacher=self.teacher.labels_of(batch.row_indices)) for batch in batches]
        if len(batches) < math.ceil(len(parts) / self.num_ranks):
            shortest = min(row_indices, key=lambda row: int(self.rows.lengths[row]))
            batch = collate(self.rows, [shortest], packing=self.packing)
            labels = torch.full_like(batch.labels, IGNORE_INDEX)
            batches.append(
                replace(batch, labels=labels, row_indices=(), num_tokens=0, row_labels=(), row_weights=torch.empty(0))
            )
        if self.mismatched is not None:
            others = self.mismatched.micro_batches(row_indices)
            batches = [replace(one, mismatched=other) for one, other in zip(batches, others, strict=True)]
        return batches

    def cut(self, row_indices: list[int]) -> list[list[int]]:
        """Cut a step's rows into micro-batches; without packing of similar lengths, so that less is padded."""
        groups = self._groups(np.asarray(row_indices))
        size = min(self.micro_batch_size // groups.shape[1], math.ceil(len(groups) / self.num_ranks))
        if not self.packing:
            groups = groups[np.argsort(self.rows.lengths[groups].max(1), kind="stable")]
        return [groups[i : i + size].ravel().tolist() for i in range(0, len(groups), size)]

    def eval_micro_batches(self) -> Iterator[Batch]:
        """Yield this rank's micro-batches of all rows, each with the name of its rows' source."""
        for rows in self.eval_batches():
            source = self.rows.part_of(rows[0]).name
            yield from (replace(batch, source=source) for batch in self.micro_batches(rows))

    def _groups(self, rows: np.ndarray) -> np.ndarray:
        """Return rows by groups, (groups, rows of a group)."""
        return rows.reshape(-1, self.rows_per_group)


def collate(
    rows: TokenDataset, row_indices: list[int], *, packing: bool, references: np.ndarray | None = None, group: int = 1
) -> Batch:
    """Return the tensors of one micro-batch of these rows. references: log p of all rows at the run's start.

    group: neighbouring rows that share the tokens that their prompts begin with; 1: none does.
    """

    def lay_out(parts: list[Tensor], value: int) -> Tensor:
        return torch.cat(parts)[None] if packing else pad_sequence(parts, batch_first=True, padding_value=value)

    ids = [torch.from_numpy(rows.ids(row).astype(np.int64)) for row in row_indices]
    masks = [torch.from_numpy(rows.label_mask(row).copy()) for row in row_indices]
    labels = [_next_tokens(tokens, label_mask) for tokens, label_mask in zip(ids, masks, strict=True)]
    num_tokens = sum(map(len, ids))
    shared = _shared(ids, masks, group)
    seen = [torch.ones_like(tokens) for tokens in ids]
    if rows.counts.numbered:
        for tokens, own in zip(ids, seen, strict=True):
            tokens[-1] = own[-1] = 0
    positions = [torch.arange(skipped, len(tokens)) for skipped, tokens in zip(shared, ids, strict=True)]
    ids, labels = ([one[skipped:] for skipped, one in zip(shared, each, strict=True)] for each in (ids, labels))
    token_weights = None
    if rows.counts.token_weighted:  # shifted, as the labels are
        pairs = zip(shared, row_indices, strict=True)
        weights = [np.append(rows.token_weights(row)[skipped + 1 :], np.float32(1)) for skipped, row in pairs]
        token_weights = lay_out(list(map(torch.from_numpy, weights)), 1)
    return Batch(
        lay_out(ids, 0),
        lay_out(labels, IGNORE_INDEX),
        lay_out(positions, 0),
        None if packing else lay_out(seen, 0),
        row_indices=tuple(row_indices),
        num_tokens=num_tokens,
        row_labels=tuple(int((label != IGNORE_INDEX).sum()) for label in labels),
        row_lengths=tuple(map(len, ids)) if packing else (),
        row_shared=tuple(shared) if any(shared) else (),
        row_weights=torch.from_numpy(rows.weights[row_indices]),
        token_weights=token_weights,
        row_references=None if references is None else torch.from_numpy(references[row_indices]),
    )


def _shared(ids: list[Tensor], masks: list[Tensor], group: int) -> list[int]:
    """Return how many tokens each row has in common with the last row of its group that shares none, as `RowLengths`.

    They end before the prompts' last tokens: each row keeps its own, whose hidden state predicts its first label.
    """
    shared = list[int]()
    first = 0
    for index, (tokens, mask) in enumerate(zip(ids, masks, strict=True)):
        first = index if index % group == 0 else first
        longest = max(0, min(int(mask.int().argmax()), int(masks[first].int().argmax())) - 1)
        others = (tokens[:longest] != ids[first][:longest]).nonzero()
        count = longest if len(others) == 0 else int(others[0])
        # few are not worth a mask of the row's own, whose size is that of the row times its own tokens
        is_worth = index > first and count >= max(LEAST_SHARED, (len(tokens) - count) // 2)
        shared.append(count if is_worth else 0)
        first = first if is_worth else index
    return shared


def _next_tokens(ids: Tensor, label_mask: Tensor) -> Tensor:
    """Return the labels of a row: at each position the next token if that is a label, else IGNORE_INDEX."""
    labels = torch.full_like(ids, IGNORE_INDEX)  # the last position has no next token, and none of another row
    labels[:-1] = torch.where(label_mask[1:], ids[1:], IGNORE_INDEX)
    return labels
