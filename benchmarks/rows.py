"""Rows of random tokens, without files: the shape of lorakit's data, packed for its engines or padded for others."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lorakit.data.batch import Batch
from lorakit.data.row_counts import RowCounts
from lorakit.data.sampler import collate


@dataclass(frozen=True)
class Row:
    """Token ids, and the label mask."""

    ids: np.ndarray
    label_mask: np.ndarray


class Rows(list[Row]):
    """Rows as lorakit's data gives them."""

    counts = RowCounts()

    @property
    def weights(self) -> np.ndarray:
        return np.ones(len(self), np.float32)

    def ids(self, row: int) -> np.ndarray:
        return self[row].ids

    def label_mask(self, row: int) -> np.ndarray:
        return self[row].label_mask


def random_rows(vocabulary: int, lengths: Iterable[int], seed: int, labels_from: float = 0.0) -> Rows:
    """Rows of these lengths; ``labels_from``: the share of each before its first label, like a prompt."""
    numbers = np.random.default_rng(seed)
    return Rows(
        Row(numbers.integers(0, vocabulary, length), np.arange(length) >= round(length * labels_from))
        for length in lengths
    )


def packed(rows: Sequence[Row], group: int = 1) -> Batch:
    """Rows as one micro-batch of one line. group: neighbours that share the tokens that their prompts begin with."""
    return collate(Rows(rows), list(range(len(rows))), packing=True, group=group)  # type: ignore[arg-type]


def padded(rows: Sequence[Row], device: torch.device) -> dict[str, Tensor]:
    """Rows as lines of one length; without a mask where they are of one length already."""
    ids, labels, mask = (
        torch.nn.utils.rnn.pad_sequence([torch.from_numpy(part) for part in parts], True, value)
        for parts, value in (
            ([row.ids for row in rows], 0),
            ([np.where(row.label_mask, row.ids, -100) for row in rows], -100),
            ([np.ones_like(row.ids) for row in rows], 0),
        )
    )
    masks = {} if bool(mask.all()) else {"attention_mask": mask}
    return {name: tensor.to(device) for name, tensor in {"input_ids": ids, "labels": labels, **masks}.items()}
