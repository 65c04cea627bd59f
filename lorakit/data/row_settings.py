"""The settings of a row: how it is made of a file's columns and encoded, and whether it is held out.

`data.columns` has for each key of a row a column's name, or a text with columns in braces:

    columns   {prompt: "Question: {question}\\nAnswer: ", completion: answer}
    file      {"question": "2+2?", "answer": "4", "level": 1}
    row       {"prompt": "Question: 2+2?\\nAnswer: ", "completion": "4"}        level is not read

Invariant: a column that a row lacks is a BadRow that names the columns there are, unless its key may be absent.
Invariant of the split: it is a function of a digest of the row's content and the share alone. So equal rows are on the
same side, and no row changes sides when others come, go or move. The rows of a share are among those of every larger
share.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from string import Formatter
from typing import Any, Final

from lorakit.data.head_labels import HeadLabels
from lorakit.data.row_files import BadRow, json_value
from lorakit.data.row_formats import FORMATS, HARMLESS, has_value, refusal
from lorakit.recipe.objective import ProblemType

MAY_BE_ABSENT: Final = frozenset({"weight", *(key for form in FORMATS for key in form.optional)})
"""keys of a row that it may lack"""
Columns = tuple[tuple[str, str], ...]  # (key of a row, column or template): `data.columns`


@dataclass(frozen=True)
class RowSettings:
    """Settings that decide the tokens and labels of a row."""

    max_tokens: int = 512
    on_long_rows: str = "stop"
    on_bad_rows: str = "stop"
    loss_on: str = "answer"  # ``answer`` (answers and completions) or ``all`` (every token)
    ignore_keys: tuple[str, ...] = ()
    columns: Columns = ()  # empty: the keys of a row are those of the file
    limit: int | None = None  # rows that are read, the first ones; None: all
    eval_share: float = 0.0  # share of the rows that is held out
    eval_side: bool = False  # take the rows that are held out, instead of the others
    turns: str = "auto"  # which answers of a conversation share a row, as `data.turns`
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """variables for the chat template, as `data.chat_template_kwargs`"""
    pairs: bool = False  # rows have a chosen and a rejected answer, and each becomes two
    labels: tuple[str, ...] | None = None
    """of the values of a head, which predicts one more token behind each row's text; None: rows have label tokens"""
    problem_type: ProblemType | None = None  # what a row's `label` is; None: rows have none, such as for a reward
    texts: int = 0  # of an anchor, a positive and its negatives in each row, which becomes as many; 0: no such texts
    pooling: str | None = None  # lasttoken, mean or cls: which tokens' hidden states a text's embedding is of
    verdicts: bool = False  # each row's `label` says whether its answer is desirable; of others the weight is below 0
    today: str | None = None
    """date as YYYY-MM-DD that a chat template writes as today's; None: no template writes one, or the clock's"""

    @property
    def group_size(self) -> int:
        """Rows of tokens that a row becomes, and that stay together; 1: those of its answers, each by itself."""
        return 2 if self.pairs else self.texts or 1

    @property
    def head_labels(self) -> HeadLabels | None:
        return None if self.problem_type is None else HeadLabels(self.labels or (), self.problem_type)

    @property
    def max_bytes(self) -> int:
        """Bytes of the longest row that is tokenised: more than any of ``max_tokens`` has, or a book that is cut."""
        return max(1_000_000, 64 * self.max_tokens, 8_000_000 if self.on_long_rows in ("split", "fill") else 0)

    def is_on_side(self, row: Any) -> bool:
        """True if a file's row is on this side of the split; one that is no mapping is on the side of training."""
        if not self.eval_share:
            return True
        if not isinstance(row, Mapping):
            return not self.eval_side
        # the training content of the row: without weight and origin, and without what templates write around it
        if self.columns:
            weights = {source for key, source in self.columns if key in ("weight", "weights")}
            names = all_columns(self.columns) - weights
            content = {name: json_value(row[name]) for name in names if row.get(name) is not None}
        else:
            left_out = HARMLESS | {"weight", "weights"} | set(self.ignore_keys)
            content = {key: json_value(value) for key, value in row.items() if key not in left_out and has_value(value)}
        text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=str)
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        is_eval_row = int.from_bytes(digest[:8], "big") < self.eval_share * 2**64
        return is_eval_row == self.eval_side


def map_columns(row: Any, columns: Columns) -> Any:
    """Return the row that ``columns`` make of a file's row, or a BadRow. Without columns, the row itself."""
    try:
        return _map(row, columns) if columns and isinstance(row, Mapping) else row
    except BadRow as problem:
        return problem


def read_columns(row: Mapping[str, Any], columns: Columns) -> set[str]:
    """Return the columns of a file's row that `map_columns` reads."""
    present = {name for name, value in row.items() if value is not None}
    read = (names for _, source in columns if present.issuperset(names := source_columns(source)))
    return {name for names in read for name in names}


def all_columns(columns: Columns) -> frozenset[str]:
    return frozenset(name for _, source in columns for name in source_columns(source))


def source_columns(source: str) -> tuple[str, ...]:
    """Return the columns of one value of `data.columns`: of a template all in braces, else the name itself."""
    return tuple(name for _, name in _parts(source) if name is not None) if "{" in source else (source,)


def _map(row: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    present = {name: value for name, value in row.items() if value is not None}
    for name in ("label", "kto_tag"):
        if str(present.get(name)).lower() == "false" and name not in all_columns(columns):
            raise refusal(name)
    result = {}
    for key, source in columns:
        missing = [name for name in source_columns(source) if name not in present]
        if not missing:
            value = _fill(source, present) if "{" in source else present[source]
            if key == "weight" and isinstance(value, str):  # as every cell of a CSV file is
                with suppress(ValueError):  # refused with all other weights
                    value = float(value)
            result[key] = value
        elif key not in MAY_BE_ABSENT:
            listed = ", ".join(map(repr, list(present)[:20])) or "none"
            raise BadRow(f"data.columns.{key}: the row has no {missing[0]!r}; its columns: {listed}")
    return result


@cache
def _parts(template: str) -> tuple[tuple[str, str | None], ...]:
    """Return (text, column after it) of a template; the last column may be None."""
    return tuple((text, name) for text, name, _, _ in Formatter().parse(template))


def _fill(template: str, row: Mapping[str, Any]) -> str:
    return "".join(text + ("" if name is None else _text(name, row[name])) for text, name in _parts(template))


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadRow(f"data.columns: {name!r} in a template is text or a number, got {type(value).__name__}")
    return str(value)
