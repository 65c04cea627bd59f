"""Seeds of a step's random numbers, as functions of the run's seed, the step and the row: checkpoints need no state."""

import hashlib

import torch

from lorakit.data.batch import Batch
from lorakit.ops.dropout import TokenKeys


def dropout_keys(batch: Batch, seed: int, step: int) -> TokenKeys:
    """Return the keys of a micro-batch's dropout and noise.

    They are functions of seed, step and row, so checkpoints need no state.
    """
    positions, lengths = batch.position_ids.flatten(), batch.lengths_of_tokens()
    if not batch.row_indices:  # a rank without rows: its tokens have no label
        return TokenKeys(torch.zeros_like(positions), positions, lengths)
    seeds = torch.tensor([*(derived_seed(seed, step, f"row {row}") for row in batch.row_indices), 0])  # 0: padding
    return TokenKeys(seeds[batch.rows_of_tokens()], positions, lengths)


def derived_seed(seed: int, step: int, part: int | str) -> int:
    """Return a seed of 56 bits for a part of a step."""
    return int.from_bytes(hashlib.sha256(f"dropout/{seed}/{step}/{part}".encode()).digest()[:7], "little")
