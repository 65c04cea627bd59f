"""How many tokens a forward pass has: the longest micro-batch of the recipe's rows, or the longest it allows.

Rows are looked at when they are tokenised already, or few enough to be now. Otherwise every row is taken to have
`data.max_tokens`, all of them learnt, and the plan says so.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from lorakit.base.load import load_tokenizer
from lorakit.data import BatchSampler, TokenDataset
from lorakit.data.rows import SUFFIXES
from lorakit.data.sampler import epoch_order
from lorakit.data.token_cache import load_split
from lorakit.errors import DataError
from lorakit.planning.memory_counter import MicroBatch
from lorakit.recipe import Recipe
from lorakit.recipe.schema import count_steps

FEW_BYTES: Final = 20_000_000  # of rows: some seconds to tokenise
LOOKED_AT: Final = 4_000_000  # rows of a run whose micro-batches are looked at one by one
HEAVIEST: Final = 16  # micro-batches whose labels are counted


@dataclass(frozen=True)
class Workload:
    """What one process computes: its longest micro-batch in training and evaluation, and how much a step has."""

    training: MicroBatch
    evaluation: MicroBatch | None
    micro_batches: int
    """Of each process in a step, one after the other."""
    tokens_per_step: float
    """Over all processes, on average."""
    row_tokens: float
    """Of a row, on average."""
    num_steps: int | None
    known: str
    """Where these numbers are from, in words."""


@dataclass(frozen=True)
class KnownRows:
    """The rows of a recipe, as far as they are known without much work."""

    training: TokenDataset | None
    evaluation: TokenDataset | None
    why_not: str = ""


def inspect_rows(recipe: Recipe, folder: Path) -> KnownRows:
    """The tokenised rows, unless that would take long or they are not there."""
    data = recipe.data
    names = [data.train, *([data.eval] if data.eval is not None else [])]
    files = [path for name in names for path in _files(name)]
    if not all(path.is_file() for path in files):
        return KnownRows(None, None, "the rows are not on this machine")
    if sum(path.stat().st_size for path in files) > FEW_BYTES:
        return KnownRows(None, None, f"the rows are more than {FEW_BYTES // 1_000_000} MB")
    try:
        tokenizer = load_tokenizer(folder)
        training = load_split(data, data.train, data.hub_split, tokenizer)
        evaluation = None if data.eval is None else load_split(data, data.eval, data.hub_eval_split, tokenizer)
    except DataError as problem:
        return KnownRows(None, None, f"the rows cannot be read: {str(problem).splitlines()[0]}")
    return KnownRows(training, evaluation)


def workload(recipe: Recipe, rows: KnownRows, num_processes: int) -> Workload:
    """The workload of each of ``num_processes`` processes."""
    train = recipe.train
    size = train.micro_batch_size or min(8, train.batch_size)
    size = min(size, math.ceil(train.batch_size / num_processes))
    count = math.ceil(math.ceil(train.batch_size / size) / num_processes)
    if rows.training is None:
        longest = _form([recipe.data.max_tokens] * size, [recipe.data.max_tokens] * size, recipe.data.packing)
        evaluation = None if recipe.data.eval is None else longest
        return Workload(
            longest, evaluation, count, train.batch_size * recipe.data.max_tokens, recipe.data.max_tokens, train.steps,
            f"{rows.why_not}: each is taken to have max_tokens {recipe.data.max_tokens}, all learnt",
        )  # fmt: skip
    steps, mean = count_steps(recipe, len(rows.training)), float(np.mean(rows.training.lengths))
    return Workload(
        _longest(recipe, rows.training, size, steps, num_processes),
        None if rows.evaluation is None else _longest_in_order(recipe, rows.evaluation, size), count,
        train.batch_size * mean, mean, steps, f"{len(rows.training):,}, of which the longest count",
    )  # fmt: skip


def _files(name: str | tuple[str, ...]) -> Iterator[Path]:
    for one in [name] if isinstance(name, str) else name:
        path = Path(one)
        yield from (p for p in path.iterdir() if p.name.endswith(SUFFIXES)) if path.is_dir() else [path]


def _longest(recipe: Recipe, rows: TokenDataset, size: int, steps: int, num_processes: int) -> MicroBatch:
    """Of the micro-batches that this very run makes; or, of a very long run, of all that could be made."""
    batches = BatchSampler(
        rows, recipe.train.batch_size, size, recipe.data.packing, recipe.train.seed, num_ranks=num_processes
    )
    if steps * recipe.train.batch_size > LOOKED_AT:
        return _heaviest(recipe, rows, [np.argsort(rows.lengths)[-size:].tolist()])
    return _heaviest(recipe, rows, _micro_batches(batches, steps))


def _micro_batches(batches: BatchSampler, steps: int) -> Iterator[list[int]]:
    per_epoch = batches.steps_per_epoch
    for epoch in range(math.ceil(steps / per_epoch)):
        order = epoch_order(batches, epoch)
        for step in range(min(per_epoch, steps - epoch * per_epoch)):
            chosen = order[step * batches.batch_size : (step + 1) * batches.batch_size]
            size = min(batches.micro_batch_size, math.ceil(len(chosen) / batches.num_ranks))
            yield from (chosen[i : i + size].tolist() for i in range(0, len(chosen), size))


def _longest_in_order(recipe: Recipe, rows: TokenDataset, size: int) -> MicroBatch:
    """Of evaluation, which takes rows by their length."""
    batches = BatchSampler(rows, recipe.train.batch_size, size, recipe.data.packing, recipe.train.seed)
    return _heaviest(recipe, rows, batches.eval_batches())


def _heaviest(recipe: Recipe, rows: TokenDataset, micro_batches: Iterator[list[int]] | list[list[int]]) -> MicroBatch:
    """The form of the longest, with the most labels that any of the longest has."""
    lengths = np.asarray(rows.lengths)

    def num_tokens(chosen: list[int]) -> int:
        return int(lengths[chosen].sum() if recipe.data.packing else lengths[chosen].max() * len(chosen))

    found = sorted(micro_batches, key=num_tokens)[-HEAVIEST:]
    forms = [
        _form(
            lengths[chosen].tolist(), [int(rows.learnt(row)[1:].sum()) for row in chosen], recipe.data.packing
        )
        for chosen in found
    ]  # fmt: skip
    return replace(
        forms[-1], num_labels=min(forms[-1].num_tokens, max(form.num_labels for form in forms)),
        masked=any(form.masked for form in forms),
    )  # fmt: skip


def _form(lengths: list[int], labels: list[int], packing: bool) -> MicroBatch:
    total, num_labels = sum(lengths), max(1, sum(labels))
    if packing:
        return MicroBatch(1, total, num_labels, packed=True, masked=len(lengths) > 1, row_lengths=tuple(lengths))
    padded = len(set(lengths)) > 1
    return MicroBatch(len(lengths), max(lengths), num_labels, packed=False, masked=padded)
