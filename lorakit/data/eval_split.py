"""Decide which rows are held out, by a digest of their content.

Invariant: the decision is a function of the row's content and the share alone. So equal rows are on the same side, and
no row changes sides when others come, go or move. The rows of a share are among those of every larger share.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

from lorakit.data.columns import Columns, all_columns
from lorakit.data.json_row import without_none
from lorakit.data.row_keys import HARMLESS, has_value


def is_eval_row(content: Mapping[str, Any] | None, share: float) -> bool:
    """True if a row with this content is one of a share of the rows that is held out."""
    if content is None:
        return False
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=str)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def content_of(row: Any, columns: Columns, ignore: Collection[str]) -> dict[str, Any] | None:
    """Return the training content of a file's row, without its weight and its origin.

    With ``columns``, those that are read, whatever a template writes around them. None if the row is no mapping.
    """
    if not isinstance(row, Mapping):
        return None
    if columns:
        names = all_columns(columns) - {source for key, source in columns if key == "weight"}
        return {name: without_none(row[name]) for name in names if row.get(name) is not None}
    left_out = HARMLESS | {"weight"} | set(ignore)
    return {key: without_none(value) for key, value in row.items() if key not in left_out and has_value(value)}
