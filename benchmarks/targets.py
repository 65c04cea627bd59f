"""Where figures should be, beside where they are."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.machine import table


@dataclass(frozen=True)
class Target:
    """A row: which figure of which program, and where it should be."""

    row: str
    program: str
    figure: str
    at_most: float | None = None
    at_least: float | None = None

    def met(self, value: float) -> bool:
        return (self.at_most is None or value <= self.at_most) and (self.at_least is None or value >= self.at_least)

    def words(self) -> str:
        return f"<= {self.at_most:g}" if self.at_most is not None else f">= {self.at_least:g}"

    def of(self, found: dict[str, Any]) -> float | None:
        """The figure in a result, where it was measured."""
        value: float | None = found["rates"].get(self.program, {}).get(self.figure)
        return value


def measured(targets: Sequence[Target], found: dict[str, Any]) -> Iterator[tuple[Target, float]]:
    """Every target whose figure a result has, and the figure."""
    for target in targets:
        if (value := target.of(found)) is not None:
            yield target, value


def summary(targets: Sequence[Target], found: dict[str, Any], before: dict[str, Any] | None = None) -> None:
    """Every target, what was measured, and what an earlier result had."""
    lines: list[tuple[str, ...]] = [("", "figure", "target", "measured", "met", *(["before"] if before else []))]
    for target, value in measured(targets, found):
        was = target.of(before) if before else None
        earlier = ["-" if was is None else f"{was:.3f}"] if before else []
        met = "yes" if target.met(value) else "NO"
        lines.append((target.row, target.figure, target.words(), f"{value:.3f}", met, *earlier))
    print()
    table(lines)
