"""Draw curves over steps with matplotlib: the picture of a run's loss, and that of several runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

Curve = Sequence[tuple[int, float]]  # (step, value)
THIN: Final = "#9ecae1"
MAIN: Final = "#08519c"
HELD_OUT: Final = "#d94801"
STYLE: Final = {
    "font.sans-serif": ["DejaVu Sans"],
    "lines.markersize": 4,
    "svg.fonttype": "none",  # text as text
    "text.parse_math": False,  # "$" in a title or label begins no formula
}
"""matplotlib's settings"""
MIN_LOG_RATIO: Final = 3.0
"""largest value through smallest one, from which on an axis is logarithmic; below it a linear one has more ticks"""
PLAIN: Final = (1e-6, 1e7)  # range of the largest value whose ticks are plain decimals
MAX_MARKERS: Final = 60  # points of a line that are marked; more hide the line


@dataclass(frozen=True)
class ChartLine:
    """One line of a chart. color: None takes matplotlib's next one. marked: mark the points, if they are few."""

    label: str
    points: Curve
    color: str | None = None
    width: float = 1.4
    marked: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines over steps, on a logarithmic axis unless the values are near each other."""

    title: str
    lines: Sequence[ChartLine]
    y_label: str = ""  # name of the values


def draw(charts: Sequence[Chart], file: Path) -> None:
    """Draw charts side by side, as the file's suffix says. Titles and labels may be any text."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8 * len(charts), 4.5), dpi=120, layout="constrained")
        for number, chart in enumerate(charts, 1):
            _draw_chart(figure.add_subplot(1, len(charts), number), chart)
        figure.savefig(file)


def _draw_chart(axes: Any, chart: Chart) -> None:
    values = list[float]()
    for line in chart.lines:
        x, y = zip(*line.points, strict=True) if line.points else ((), ())
        values += y
        is_marked = len(x) == 1 or (line.marked and len(x) <= MAX_MARKERS)
        label = f" {line.label}"  # matplotlib hides one that begins with "_"
        marker = "o" if is_marked else None
        axes.plot(x, y, color=line.color, linewidth=line.width, marker=marker, label=label)
    low, high = min(values, default=0.0), max(values, default=0.0)
    if 0 < low * MIN_LOG_RATIO <= high:
        decades = math.log10(high / low)
        digits = (2, 3, 4, 5, 6, 8) if decades < 1 else (2, 5) if decades < 3 else ()
        axes.set_yscale("log", subs=digits)  # ticks between powers of ten, fewer on a longer axis
        axes.yaxis.set_major_formatter(_decimal)
        axes.yaxis.set_minor_formatter(_decimal)
    else:
        is_plain = PLAIN[0] <= max(high, -low) < PLAIN[1]
        axes.ticklabel_format(axis="y", useOffset=False, style="plain" if is_plain else "sci")
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.set_title(chart.title)
    axes.set_xlabel("step")
    axes.set_ylabel(chart.y_label)
    axes.grid(alpha=0.3, which="both")
    if values:
        axes.legend()


def _decimal(value: float, _position: int | None) -> str:
    """Return a tick's value, of few digits, as text, such as 0.00002."""
    return f"{value:.8f}".rstrip("0").rstrip(".") if PLAIN[0] <= value < PLAIN[1] else f"{value:g}"


def loss_chart(title: str, losses: Curve, eval_losses: Curve) -> Chart:
    """Return a chart of training losses (thin), their running mean, and held-out losses."""
    lines = [
        ChartLine("step", losses, THIN, width=0.8),
        ChartLine("running mean", running_mean(losses), MAIN),
        ChartLine("held out", eval_losses, HELD_OUT, marked=True),
    ]
    return Chart(title, [line for line in lines if line.points], "loss")


def running_mean(curve: Curve) -> Curve:
    """Return for each step the mean of the steps around it: over a thirtieth of the run, and over 5 at least.

    Around it, because a mean of the steps before lies above a falling loss. Of logarithms, unless a value is negative.
    """
    half = max(2, len(curve) // 60)
    is_log = all(value >= 0 for _, value in curve)
    sums = [0.0, *accumulate(math.log(max(value, 1e-12)) if is_log else value for _, value in curve)]
    windows = [(max(0, index - half), min(len(curve), index + half + 1)) for index in range(len(curve))]
    means = [(sums[stop] - sums[start]) / (stop - start) for start, stop in windows]
    means = [math.exp(mean) for mean in means] if is_log else means
    return [(step, mean) for (step, _), mean in zip(curve, means, strict=True)]
