"""Which rows make which step, and the tensors of a micro-batch.

The rows of a step are a pure function of (seed, epoch, step): nothing is remembered, so any step can be taken again
and a resumed run sees exactly the rows it would have seen. Packing changes the layout, never the rows of a step.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from lorakit.data.batch import IGNORE_INDEX, Batch
from lorakit.data.token_cache import TokenDataset

BUCKET_STEPS: Final = 16


@dataclass(frozen=True)
class BatchSampler:
    """The micro-batches of every step of a run."""

    rows: TokenDataset
    batch_size: int
    micro_batch_size: int
    packing: bool
    seed: int
    rank: int = 0
    num_ranks: int = 1
    _order: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(len(self.rows) / self.batch_size)

    def step(self, step: int) -> list[Batch]:
        """The micro-batches of step ``step`` (counted from 0). The last step of an epoch may have fewer rows."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch not in self._order:  # of one epoch at a time; drawn again when a run goes back
            self._order.clear()
            self._order[epoch] = epoch_order(self, epoch)
        chosen = self._order[epoch][index * self.batch_size : (index + 1) * self.batch_size]
        return self.micro_batches(chosen.tolist())

    def eval_batches(self) -> list[list[int]]:
        """All rows in micro-batches of similar length, for evaluation."""
        order = np.argsort(self.rows.lengths, kind="stable")
        return [order[i : i + self.micro_batch_size].tolist() for i in range(0, len(order), self.micro_batch_size)]

    def micro_batches(self, rows: list[int]) -> list[Batch]:
        """Rows -> this rank's micro-batches of at most ``micro_batch_size`` rows, as many on every rank.

        Where rows are fewer than places, a rank gets a row of which nothing is learnt and nothing counted.
        """
        size = min(self.micro_batch_size, math.ceil(len(rows) / self.num_ranks))
        parts = [rows[i : i + size] for i in range(0, len(rows), size)]
        mine = [collate(self.rows, part, packing=self.packing) for part in parts[self.rank :: self.num_ranks]]
        if len(mine) < math.ceil(len(parts) / self.num_ranks):
            shortest = min(rows, key=lambda row: int(self.rows.lengths[row]))
            mine.append(without_labels(collate(self.rows, [shortest], packing=self.packing)))
        return mine


def epoch_order(batches: BatchSampler, epoch: int) -> np.ndarray:
    """The order of rows in an epoch: a permutation, a function of seed and epoch alone.

    Without packing, rows of similar length are put into the same steps: windows of the permutation are sorted by
    length, and the steps in a window shuffled.
    """
    numbers = np.random.Generator(np.random.Philox(key=[batches.seed, epoch]))
    order = numbers.permutation(len(batches.rows))
    if batches.packing:
        return order
    window = batches.batch_size * BUCKET_STEPS
    parts = []
    for start in range(0, len(order), window):
        part = order[start : start + window]
        part = part[np.argsort(batches.rows.lengths[part], kind="stable")]
        steps = [part[i : i + batches.batch_size] for i in range(0, len(part), batches.batch_size)]
        whole = steps if len(steps[-1]) == batches.batch_size else steps[:-1]
        parts += [whole[i] for i in numbers.permutation(len(whole))] + steps[len(whole) :]
    return np.concatenate(parts)


def collate(rows: TokenDataset, chosen: list[int], *, packing: bool) -> Batch:
    """The tensors of one micro-batch."""
    ids = [torch.from_numpy(rows.ids(row).astype(np.int64)) for row in chosen]
    labels = [
        _shifted(tokens, torch.from_numpy(rows.learnt(row).copy())) for tokens, row in zip(ids, chosen, strict=True)
    ]
    positions = [torch.arange(len(tokens)) for tokens in ids]
    if packing:
        input_ids, shifted, position_ids = (torch.cat(parts)[None] for parts in (ids, labels, positions))
        mask = None
    else:
        input_ids, shifted, position_ids = _pad(ids, 0), _pad(labels, IGNORE_INDEX), _pad(positions, 0)
        mask = _pad([torch.ones_like(tokens) for tokens in ids], 0)
    num_label_tokens = sum(int((label != IGNORE_INDEX).sum()) for label in labels)
    lengths = tuple(map(len, ids))
    told = lengths if packing else ()
    return Batch(input_ids, shifted, position_ids, mask, tuple(chosen), sum(lengths), num_label_tokens, told)


def without_labels(batch: Batch) -> Batch:
    """The same tensors, of which nothing is learnt and nothing counted: work for a rank that has none."""
    return replace(batch, labels=torch.full_like(batch.labels, IGNORE_INDEX), rows=(), num_tokens=0, num_label_tokens=0)


def _shifted(ids: Tensor, learnt: Tensor) -> Tensor:
    labels = torch.full_like(ids, IGNORE_INDEX)
    labels[:-1] = torch.where(learnt[1:], ids[1:], IGNORE_INDEX)
    return labels


def _pad(parts: list[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=value)
