"""A teacher's likeliest tokens that rows bring themselves, such as those that a server wrote beside its answers.

    {"input_ids": [5, 7, 9], "labels": [-100, -100, 9], "teacher_logprobs": [{"9": -0.1, "4": -2.5}]}

`teacher_logprobs` has an object for each label token of the row, in order: ids (vLLM's `token_id:9` too), and log p.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from lorakit.data.dataset import TokenDataset
from lorakit.data.load import row_sets
from lorakit.data.rows import read_rows
from lorakit.errors import DataError
from lorakit.objectives.divergence import SMALLEST
from lorakit.recipe import Recipe

KEY: Final = "teacher_logprobs"
SLACK: Final = 1e-3  # by which a sum of rounded probabilities may be above 1


def likeliest_of_rows(
    recipe: Recipe, side: str, rows: TokenDataset, num_tokens: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what the rows of a data set bring, row by row, as `TeacherTable` has it. num_tokens: of the vocabulary.

    Raises DataError: a row brings none, or for another number of labels, or fewer than `objective.top_k` tokens.
    """
    top_k = int(recipe.objective.settings["top_k"])
    sources = (source for one in row_sets(recipe) if one.side == side for source in one.sources())
    raw = ((f"{source.name}:{line}", row) for source in sources for line, row in read_rows(source))
    for index in range(len(rows)):
        where = rows.location(index)
        taught = next((row for location, row in raw if location == where), None)
        if taught is None:
            raise DataError(f"{where}: became several rows, whose labels {KEY} does not tell apart; data.turns: last")
        given = taught.get(KEY) if isinstance(taught, Mapping) else None
        count = int(rows.label_mask(index)[1:].sum())
        if not isinstance(given, list) or len(given) != count:
            has = f"{len(given)} entries" if isinstance(given, list) else "none"
            raise DataError(
                f"{where}: {KEY}: one object for each of its {count} label tokens expected, got {has}; or name"
                " objective.teacher"
            )
        best = [_best(entry, top_k, num_tokens, f"{where}: {KEY}: entry {n}") for n, entry in enumerate(given, 1)]
        tokens = torch.tensor([list(one) for one in best], dtype=torch.int64)
        log_p = torch.tensor([list(one.values()) for one in best], dtype=torch.float64)
        others = (1 - log_p.exp().sum(1, keepdim=True)).clamp(min=SMALLEST).log()
        yield tokens, torch.cat([log_p, others], 1).float()


def _best(entry: Any, top_k: int, num_tokens: int, where: str) -> dict[int, float]:
    """Return the likeliest tokens of an entry, and log p of each. Raises DataError: it is not such an object."""
    try:
        known = {int(str(token).removeprefix("token_id:")): float(log_p) for token, log_p in entry.items()}
        if len(known) < len(entry):
            raise ValueError("a token twice")
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise DataError(f"{where}: an object of token ids and log p expected, got {repr(entry)[:60]}") from None
    for token, log_p in known.items():
        if not (0 <= token < num_tokens and -math.inf < log_p <= SLACK):
            raise DataError(f"{where}: {token}: {log_p}: no token of {num_tokens:,}, or no log p up to 0")
    if len(known) < top_k:
        raise DataError(f"{where}: {len(known)} tokens, and objective.top_k is {top_k}; set top_k: {len(known)}")
    if math.fsum(map(math.exp, known.values())) > 1 + SLACK:
        raise DataError(f"{where}: the probabilities add up to more than 1; they are natural logarithms")
    return dict(sorted(known.items(), key=lambda one: (-one[1], one[0]))[:top_k])
