"""Text for a person: aligned columns, sizes in bytes, counts."""

from collections.abc import Sequence
from typing import Final

UNITS: Final = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def columns(rows: Sequence[Sequence[str]], align: str = "") -> list[str]:
    """Return a line of text for each row, with equal columns and two spaces between them.

    align: ``<`` (left) or ``>`` (right) for each column; columns beyond it are aligned to the left.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = align.ljust(len(widths), "<")
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]


def size(num_bytes: float) -> str:
    """Return bytes in decimal units with three significant digits, such as ``16.1 GB``."""
    for unit, name in UNITS:
        if num_bytes >= unit:
            value = num_bytes / unit
            return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f} {name}"
    return f"{num_bytes:.0f} bytes"


def count(number: int) -> str:
    """Return a count in short, such as ``8.03 B``, ``131.07 k`` or ``28``."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.2f} {name}"
    return str(number)
