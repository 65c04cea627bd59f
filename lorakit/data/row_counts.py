"""Count rows, tokens and labels while rows are encoded, and group bad rows by their reasons."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

LARGEST: Final = ("largest_id", "longest")  # fields that are the largest value of any row; the other numbers are sums
CHANGES: Final = {
    "truncated": "truncated",
    "dropped_long": "dropped as too long",
    "dropped_unlabelled": "dropped: no label is left within max_tokens",
    "bad": "bad, skipped",
    "divided": "divided into several rows, as their answers are asked (data.turns)",
    "split": "text(s) split",
    "joined": "text(s) joined",
    "zero_weight": "of weight 0 left out",
    "shared": "left out because held out too",
}
"""field -> how the rows of a data set are other than those of its files"""
SHOWN_REASONS: Final = 10
SHOWN_LOCATIONS: Final = 3  # first rows of each reason that are named
OWN: Final = re.compile(r"message \d+|'[^']*'|, got [^a-z].*")  # what reasons of one problem differ by


@dataclass
class RowCounts:
    """Counts of rows, tokens and label tokens, and of rows not used."""

    rows: int = 0  # rows of the data set, without bad and dropped ones
    file_rows: int = 0  # rows of the files on this side of a split, before any is left out or becomes several
    bad: int = 0
    truncated: int = 0
    dropped_long: int = 0
    dropped_unlabelled: int = 0  # rows of which truncation leaves no label
    tokens: int = 0
    label_tokens: int = 0
    largest_id: int = 0
    longest: int = 0  # tokens of the longest row, before truncation
    unread: dict[str, int] = field(default_factory=dict)  # key that was not read -> rows that have it
    notes: dict[str, int] = field(default_factory=dict)  # note, as of `Chat` -> rows that have it
    plain: int = 0  # rows of plain text, rendered by no template
    system: str | None = None  # system prompt that every row begins with; None: there is none, or another in some rows
    zero_weight: int = 0  # rows of weight 0, which are left out
    token_weighted: int = 0  # rows with a label whose own weight is not 1
    numbered: int = 0  # rows whose last token is the number of a label, and no token of the vocabulary
    split: int = 0  # texts longer than ``max_tokens`` that became several rows
    joined: int = 0  # texts that were joined end to end
    pairs: int = 0
    """rows of the files that became several, neighbours in a fixed order: two answers, or an anchor and its texts"""
    divided: int = 0  # conversations that became several rows
    shared: int = 0  # training rows that are left out, because they are held-out rows too
    eval_rows: int = 0  # rows that are held out of the training rows
    today: str | None = None  # date as YYYY-MM-DD that the chat template wrote as today's; None: it writes none
    mapped: dict[str, int] = field(default_factory=dict)  # column that `data.columns` names -> rows that have it

    def add(self, other: "RowCounts") -> None:
        if not self.rows:
            self.system = other.system
        elif other.rows and other.system != self.system:
            self.system = None
        self.today = self.today or other.today
        for name, theirs in vars(other).items():
            mine = getattr(self, name)
            if isinstance(theirs, dict):
                self.add_keys(mine, theirs)
            elif isinstance(theirs, int):
                setattr(self, name, max(mine, theirs) if name in LARGEST else mine + theirs)

    def changes(self) -> list[str]:
        """Return how many rows are other than those of their files, for each reason, such as ``3 truncated``."""
        return [f"{getattr(self, name):,} {what}" for name, what in CHANGES.items() if getattr(self, name)]

    @staticmethod
    def add_keys(table: dict[str, int], added: Mapping[str, int] | Iterable[str]) -> None:
        """Add numbers of rows by key, or one row for each key, in the order of their names."""
        for key in sorted(added):
            table[key] = table.get(key, 0) + (added[key] if isinstance(added, Mapping) else 1)


@dataclass
class BadRows:
    """The rows that cannot be used, by the first ten reasons."""

    numbers: dict[str, int] = field(default_factory=dict)  # reason, in the words of the first row -> rows
    locations: dict[str, list[str]] = field(default_factory=dict)  # reason -> file:line of the first rows

    def add(self, reason: str, location: str) -> None:
        """Add a row; one of an eleventh reason is not noted."""
        problem = OWN.sub("", reason)
        reason = next((known for known in self.numbers if OWN.sub("", known) == problem), reason)
        if reason in self.numbers or len(self.numbers) < SHOWN_REASONS:
            self.numbers[reason] = self.numbers.get(reason, 0) + 1
            self.locations[reason] = [*self.locations.get(reason, []), location][:SHOWN_LOCATIONS]

    def listed(self, total: int) -> str:
        """Return a line for each reason: number of rows, the first ones, the reason. ``total``: of all bad rows."""
        lines = []
        for reason, number in self.numbers.items():
            where = ", ".join(self.locations[reason]) + (", ..." if number > SHOWN_LOCATIONS else "")
            first = ", the first" if OWN.search(reason) else ""
            lines.append(f"{where}: {reason}" if number == 1 else f"{number:,} rows ({where}){first}: {reason}")
        others = total - sum(self.numbers.values())
        return "\n  ".join([*lines, *([f"... and {others:,} more, for other reasons"] if others else [])])
