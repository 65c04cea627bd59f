"""Count rows, tokens and labels while rows are encoded."""

from dataclasses import asdict, dataclass, field, fields
from typing import Final

LARGEST: Final = ("largest_id", "longest")
"""fields that are the largest value of any row; the other numbers are sums"""


@dataclass
class RowCounts:
    """Counts of rows, tokens and label tokens, and of rows not used."""

    rows: int = 0
    """rows of the data set, without bad and dropped ones"""
    bad: int = 0
    truncated: int = 0
    dropped_long: int = 0
    tokens: int = 0
    label_tokens: int = 0
    largest_id: int = 0
    long: int = 0
    """rows longer than ``max_tokens``, whether truncated or dropped"""
    longest: int = 0
    """tokens of the longest row, before truncation"""
    unread: dict[str, int] = field(default_factory=dict)
    """key that was not read -> rows that have it"""
    plain: int = 0
    """rows of plain text, rendered by no template"""
    system: str | None = None
    """system prompt that every row begins with; None if there is none, or another in some rows"""
    zero_weight: int = 0
    """rows of weight 0, which are left out"""

    def add(self, other: "RowCounts") -> None:
        """Add the counts of further rows."""
        if not self.rows:
            self.system = other.system
        elif other.rows and other.system != self.system:
            self.system = None
        for key, number in other.unread.items():
            self.unread[key] = self.unread.get(key, 0) + number
        for name in (each.name for each in fields(self) if each.name not in ("unread", "system")):
            one, two = getattr(self, name), getattr(other, name)
            setattr(self, name, max(one, two) if name in LARGEST else one + two)

    def facts(self) -> dict[str, object]:
        """Return the counts by name, for files and records."""
        return asdict(self)
