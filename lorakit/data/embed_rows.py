"""Turn a row of an anchor, its positive and its negatives into rows of one text each, which row_formats.py reads."""

from collections.abc import Collection, Mapping
from typing import Any, Final

from lorakit.data.row_files import BadRow
from lorakit.data.row_formats import has_value

TEXTS: Final = ("anchor", "positive", "negative")


def to_texts(row: Any, num_negatives: int, ignore: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the rows of a row's texts: of its anchor, its positive, and its negatives, a text or a list of texts.

    Negatives may also be under `negative_1`, `negative_2` and so on, as sentence-transformers writes them.
    Raises BadRow: a text is missing, or empty, or there are not as many negatives.
    """
    row = row if isinstance(row, Mapping) else {}
    if missing := [key for key in TEXTS[:2] if not has_value(row.get(key))]:
        raise BadRow(
            f"the objective reads rows with `anchor` and `positive`, and this has no {' and no '.join(missing)}; name"
            " other columns: data.columns: {anchor: COLUMN, positive: COLUMN}"
        )
    numbered = [f"{TEXTS[2]}_{number}" for number in range(1, num_negatives + 1)]
    keys = (*TEXTS, *numbered)
    given = row.get(TEXTS[2])
    negatives = [*given] if isinstance(given, list | tuple) else [given]
    negatives = [one for one in (*negatives, *map(row.get, numbered)) if one is not None]
    if len(negatives) != num_negatives:
        raise BadRow(f"negative: has {len(negatives)} texts, and objective.negatives is {num_negatives}")
    texts = [row[TEXTS[0]], row[TEXTS[1]], *negatives]
    if wrong := [one for one in texts if not isinstance(one, str) or not one.strip()]:
        raise BadRow(f"anchor, positive and negative are texts, got {repr(wrong[0])[:40]}")
    if row[TEXTS[1]] in negatives:
        raise BadRow("negative: is the positive too")
    rest = {key: value for key, value in row.items() if key not in (*keys, *ignore)}
    return [{**rest, "text": text} for text in texts]
