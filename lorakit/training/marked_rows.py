"""Show rows as text with their label tokens between [[ and ]], as `check` prints them."""

from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from operator import itemgetter
from typing import Any, Final

from lorakit.data import TokenDataset
from lorakit.data.encode import Encoder
from lorakit.data.load import RowSet, eval_sets, rows_of_sets, training_sets
from lorakit.data.row_files import BadRow
from lorakit.errors import DataError
from lorakit.recipe import Recipe

SHOWN_LETTERS: Final = 1200
"""of each of the first rows; a row that is named is shown in full"""


def first_rows(rows: TokenDataset, number: int, tokenizer: Any) -> Iterator[str]:
    """Yield the first rows of a run."""
    for row in range(min(number, len(rows))):
        text = mark_labels(rows.ids(row).tolist(), rows.label_mask(row).tolist(), tokenizer)
        text = text if len(text) <= SHOWN_LETTERS else f"{text[:SHOWN_LETTERS]} ... (--row {rows.location(row)})"
        which = f"row {row + 1}" if row else "first row"
        yield f"\n{which} ({rows.location(row)}), label tokens between [[ and ]]:\n{text}"


def named_row(recipe: Recipe, name: str, tokenizer: Any) -> list[str]:
    """Return the row of a file, ``FILE:LINE``, as every row that it becomes, in full.

    Raises DataError: there is no such row, or it cannot be used.
    """
    for kind, sets in (("train", training_sets(recipe.data)), ("held out", eval_sets(recipe.data))):
        for one in sets:
            row = next((row for location, row in rows_of_sets([one]) if location == name), None)
            if row is not None:
                return list(_marked(name, kind, row, one, tokenizer))
    examples = ", ".join(location for location, _ in islice(rows_of_sets(training_sets(recipe.data)), 2))
    raise DataError(f"--row {name}: no row of data.train or data.eval; they are named as in {examples}")


def _marked(name: str, kind: str, row: Any, rows: RowSet, tokenizer: Any) -> Iterator[str]:
    try:
        if isinstance(row, BadRow):
            raise row
        encoded = Encoder(tokenizer, rows.settings)(row)
    except BadRow as problem:
        raise DataError(f"{name}: {problem}") from None
    limit = rows.settings.max_tokens
    for number, one in enumerate(encoded, 1):
        several = f", {number} of {len(encoded)} rows" if len(encoded) > 1 else ""
        long = f", longer than data.max_tokens {limit} (on_long_rows: {rows.settings.on_long_rows})"
        size = f"{len(one.ids):,} tokens{long if len(one.ids) > limit else ''}"
        yield f"\nrow {name} ({kind}{several}, {size}), label tokens between [[ and ]]:"
        yield mark_labels(one.ids, one.label_mask, tokenizer)


def mark_labels(ids: Sequence[int], label_mask: Sequence[bool], tokenizer: Any) -> str:
    """Return a row as text, with its label tokens between [[ and ]]."""
    is_label = [False, *label_mask[1:]]  # because no token predicts the first one
    text = ""
    for has_label, pairs in groupby(zip(is_label, ids, strict=True), itemgetter(0)):
        part = tokenizer.decode([token for _, token in pairs])
        text += f"[[{part}]]" if has_label else part
    return text
