"""Draw line charts as SVG text. Its colours are those of the page around it, which may be light or dark."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 640
HEIGHT: Final = 250
LEFT: Final = 64
RIGHT: Final = 12
TOP: Final = 26
BOTTOM: Final = 34
MAX_BUCKETS: Final = 500
TICKS: Final = 5

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class ChartLine:
    """One line of a chart. kind: its class in the page's style, such as ``thin``."""

    label: str
    points: Points
    kind: str


def line_chart(title: str, lines: Sequence[ChartLine], *, log: bool = False) -> str:
    """Return a chart as an ``<svg>`` element. ``log``: of a logarithmic axis, where all values are above 0.

    Title and labels may hold any text. A line of many points is drawn by the lowest and the highest point of
    each of 500 ranges.
    """
    points = [point for line in lines for point in line.points]
    x_low, x_high = _range([x for x, _ in points])
    values = [y for _, y in points]
    logarithmic = log and min(values) > 0
    y_low, y_high = _range([math.log10(y) for y in values] if logarithmic else values)

    def across(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def up(y: float) -> float:
        y = math.log10(y) if logarithmic else y
        return HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for y in _logarithmic_ticks(y_low, y_high) if logarithmic else _ticks(y_low, y_high):
        parts += [
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(y):.1f}" y2="{up(y):.1f}"/>',
            f'<text x="{LEFT - 6}" y="{up(y) + 4:.1f}" text-anchor="end">{y:.4g}</text>',
        ]
    parts += [
        f'<text x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:.0f}</text>'
        for x in _ticks(x_low, x_high)
        if x == round(x)
    ]
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">step</text>')
    for line in lines:
        drawn = [(across(x), up(y)) for x, y in _thinned(line.points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
        parts.append(f'<polyline class="{line.kind}" points="{path}"/>')
        if len(drawn) <= 30:
            parts += [f'<circle class="{line.kind}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in drawn]
    legend = "".join(f'<tspan class="{line.kind}" dx="14">{escape(line.label)}</tspan>' for line in lines)
    name = f'<tspan class="title">{escape(title)}</tspan>'
    return "".join([*parts, f'<text x="{LEFT}" y="15">{name}{legend}</text>', "</svg>"])


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis: those of the values, or around a single value."""
    low, high = min(values), max(values)
    if low == high:
        return low - max(1.0, abs(low)) / 2, high + max(1.0, abs(low)) / 2
    return low, high


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers on an axis: 1, 2 or 5 times a power of ten apart."""
    size = 10.0 ** math.floor(math.log10((high - low) / TICKS))
    step = next(size * factor for factor in (1, 2, 5, 10) if (high - low) / (size * factor) <= TICKS)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step) + 1)]


def _logarithmic_ticks(low: float, high: float) -> list[float]:
    """Return the powers of ten on a logarithmic axis; 2 and 5 times of each too where these are few."""
    factors = (1,) if high - low > TICKS else (1, 2, 5)
    powers = range(math.floor(low), math.ceil(high) + 1)
    values = [factor * 10.0**power for power in powers for factor in factors]
    return [value for value in values if low <= math.log10(value) <= high] or [10**low, 10**high]


def _thinned(points: Points) -> Points:
    if len(points) <= 2 * MAX_BUCKETS:
        return points
    size = math.ceil(len(points) / MAX_BUCKETS)
    thinned: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        extremes = {min(bucket, key=lambda point: point[1]), max(bucket, key=lambda point: point[1])}
        thinned += sorted(extremes)
    return thinned
