"""The longest micro-batch of a recipe: of its actual rows if these are cheap to read, else of the longest rows allowed.

Rows are read if they are tokenised already or few. Otherwise every row is assumed to have `data.max_tokens`, all of
them label tokens, and the plan's text says so.
"""

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from lorakit.base.from_recipe import load_recipe_tokenizer
from lorakit.data.dataset import TokenDataset
from lorakit.data.load import load_datasets, row_sets
from lorakit.data.sampler import BatchSampler
from lorakit.errors import BaseModelError, DataError
from lorakit.planning.activations import MicroBatch
from lorakit.recipe import Recipe
from lorakit.recipe.schema import batch_sizes, count_steps
from lorakit.run.display import row_progress

MAX_TOKENIZED_BYTES: Final = 20_000_000  # of row files: tokenising them takes seconds
MAX_SIMULATED_ROWS: Final = 4_000_000  # rows of a run whose micro-batches are computed one by one
NUM_LABEL_COUNTS: Final = 16  # longest micro-batches whose labels are counted


@dataclass(frozen=True)
class Workload:
    """The longest micro-batches of one process."""

    training: MicroBatch
    evaluation: MicroBatch | None  # None without held-out rows.
    micro_batches: int  # Micro-batches of each process in a step, one after the other.
    source: str  # Where these numbers come from, for the plan's text.


def inspect_rows(recipe: Recipe, folder: Path) -> dict[str, TokenDataset] | str:
    """Return the tokenised rows of a recipe, as `load_datasets`, or why they are unknown: missing, bad or large."""
    files: set[Path | None] = {None}
    with contextlib.suppress(DataError):
        files = {source.path for one in row_sets(recipe) for source in one.sources()}
    if None in files:
        return "the rows are not on this machine"
    if sum(path.stat().st_size for path in files if path) > MAX_TOKENIZED_BYTES:
        return f"the rows are more than {MAX_TOKENIZED_BYTES // 1_000_000} MB"
    try:
        return load_datasets(recipe, load_recipe_tokenizer(recipe, folder), row_progress)
    except (DataError, BaseModelError) as problem:
        return f"the rows cannot be read: {str(problem).splitlines()[0]}"


def make_workload(recipe: Recipe, rows: Mapping[str, TokenDataset] | str, num_data: int, num_sharing: int) -> Workload:
    """Return each process's workload. num_data: groups with other rows. num_sharing: processes that share a line."""
    max_tokens = recipe.data.max_tokens
    packing = bool(recipe.data.packing)
    batch_size, micro_batch_size = batch_sizes(recipe)
    size = min(micro_batch_size, math.ceil(batch_size / num_data))
    evaluation = None
    if isinstance(rows, str):
        longest = _micro_batch([max_tokens] * size, [max_tokens] * size, packing)
        evaluation = longest if recipe.data.has_eval else None
        source = f"{rows}: each is taken to have max_tokens {max_tokens}, all of them labels"
    else:
        training = rows["train"]
        longest = _longest(training, _training_batches(recipe, training, size, num_data), packing)
        if (eval_rows := rows.get("eval")) is not None:
            sampler = BatchSampler(eval_rows, batch_size, size, packing, recipe.train.seed)
            evaluation = _longest(eval_rows, sampler.eval_batches(), packing)
        source = f"{len(training) // training.group_size:,}, of which the longest count"
    return Workload(
        training=_part(longest, num_sharing),
        evaluation=None if evaluation is None else _part(evaluation, num_sharing),
        micro_batches=math.ceil(math.ceil(batch_size / size) / num_data),
        source=source,
    )


def _part(batch: MicroBatch, num_sharing: int) -> MicroBatch:
    """Return the most tokens of one process; in attention it has all of some heads, which are as many values."""
    if num_sharing == 1:
        return batch
    lengths = tuple(math.ceil(length / num_sharing) for length in batch.row_lengths)
    return replace(batch, width=sum(lengths), row_lengths=lengths, num_labels=min(batch.num_labels, sum(lengths)))


def _training_batches(recipe: Recipe, rows: TokenDataset, size: int, num_processes: int) -> Iterable[list[int]]:
    """Return the micro-batches that this run will make; of a very long run, the longest possible."""
    steps = count_steps(recipe, rows.rows_per_epoch)
    batch_size, _ = batch_sizes(recipe)
    if steps * batch_size > MAX_SIMULATED_ROWS:
        return [np.argsort(rows.lengths)[-size:].tolist()]
    packing = bool(recipe.data.packing)
    sampler = BatchSampler(rows, batch_size, size, packing, recipe.train.seed, num_ranks=num_processes)
    return (part for step in range(steps) for part in sampler.cut(sampler.rows_of_step(step)))


def _longest(rows: TokenDataset, micro_batches: Iterable[list[int]], packing: bool) -> MicroBatch:
    """Return the longest micro-batch, with the most labels of any of the NUM_LABEL_COUNTS longest."""
    lengths = np.asarray(rows.lengths)

    def num_tokens(row_numbers: list[int]) -> int:
        return int(lengths[row_numbers].sum() if packing else lengths[row_numbers].max() * len(row_numbers))

    longest = [
        _micro_batch(
            lengths[row_numbers].tolist(), [int(rows.label_mask(row)[1:].sum()) for row in row_numbers], packing
        )
        for row_numbers in sorted(micro_batches, key=num_tokens)[-NUM_LABEL_COUNTS:]
    ]
    num_labels = min(longest[-1].num_tokens, max(batch.num_labels for batch in longest))
    return replace(longest[-1], num_labels=num_labels, masked=any(batch.masked for batch in longest))


def _micro_batch(lengths: list[int], num_labels: list[int], packing: bool) -> MicroBatch:
    """Return the shape of a micro-batch of rows with these tokens and labels per row."""
    labels = max(1, sum(num_labels))
    if packing:
        return MicroBatch(1, sum(lengths), labels, packed=True, masked=len(lengths) > 1, row_lengths=tuple(lengths))
    padded = len(set(lengths)) > 1
    return MicroBatch(len(lengths), max(lengths), labels, packed=False, masked=padded)
