"""Draw pictures with matplotlib: of a run's loss, and of how often a classifier took each label for each."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from lorakit.errors import LorakitError

Curve = Sequence[tuple[int, float]]  # (step, value)
Confusion = tuple[str, Sequence[str], Counter[tuple[str, str]]]  # title, labels, rows of each (expected, predicted)
THIN: Final = "#9ecae1"
MAIN: Final = "#08519c"
HELD_OUT: Final = "#d94801"
STYLE: Final = {  # matplotlib's settings
    "font.sans-serif": ["DejaVu Sans"],
    "lines.markersize": 4,
    "svg.fonttype": "none",  # text as text
    "text.parse_math": False,  # "$" in a title or label begins no formula
}
MIN_LOG_RATIO: Final = 3.0
"""largest value through smallest one, from which on an axis is logarithmic; below it a linear one has more ticks"""
PLAIN: Final = (1e-6, 1e7)  # range of the largest value whose ticks are plain decimals
MAX_LABELS: Final = 60  # that can be read on a picture
INK: Final = 0.6  # share of a row's largest count from which on numbers are white
MAX_MARKERS: Final = 60  # points of a line that are marked; more hide the line


def draw_losses(title: str, losses: Curve, eval_losses: Curve, file: Path) -> None:
    """Draw training losses (thin), their running mean, and held-out losses, as the file's suffix says.

    On a logarithmic axis unless the values are near each other. The title may be any text.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
        axes = figure.add_subplot()
        _add_line(axes, "step", losses, THIN, 0.8)
        _add_line(axes, "running mean", running_mean(losses), MAIN, 1.4)
        _add_line(axes, "held out", eval_losses, HELD_OUT, 1.4, marked=len(eval_losses) <= MAX_MARKERS)
        _set_ticks(axes, [value for _, value in (*losses, *eval_losses)])
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        axes.grid(alpha=0.3, which="both")
        if losses or eval_losses:
            axes.legend()
        figure.savefig(file)


def _add_line(axes: Any, label: str, curve: Curve, color: str, width: float, *, marked: bool = False) -> None:
    if curve:
        marker = "o" if marked or len(curve) == 1 else None
        axes.plot(*zip(*curve, strict=True), color=color, linewidth=width, marker=marker, label=label)


def _set_ticks(axes: Any, values: Sequence[float]) -> None:
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


def _decimal(value: float, _position: int | None) -> str:
    """Return a tick's value, of few digits, as text, such as 0.00002."""
    return f"{value:.8f}".rstrip("0").rstrip(".") if PLAIN[0] <= value < PLAIN[1] else f"{value:g}"


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


def draw_confusion(path: Path, tables: Sequence[Confusion]) -> None:
    """Write a picture of all tables that are not too large for one. Raises LorakitError: there is none."""
    import matplotlib
    from matplotlib.figure import Figure

    drawn = [one for one in tables if len(one[1]) <= MAX_LABELS]
    if not drawn:
        raise LorakitError(f"--confusion: no adapter has one label a row, of up to {MAX_LABELS}")
    side = max(3.0, 0.45 * max(len(labels) for _, labels, _ in drawn) + 2)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(side * len(drawn), side), dpi=120, layout="constrained")
        for number, one in enumerate(drawn, 1):
            _draw_counts(figure.add_subplot(1, len(drawn), number), *one)
        figure.savefig(path, format="png")


def _draw_counts(axes: Any, title: str, labels: Sequence[str], counts: Counter[tuple[str, str]]) -> None:
    shares = []
    for row, label in enumerate(labels):
        own = [counts[label, other] for other in labels]
        total = max(1, sum(own))
        shares.append([count / total for count in own])
        for column, count in enumerate(own):
            if count:
                color = "white" if count / total > INK else "black"
                axes.text(column, row, str(count), ha="center", va="center", color=color, fontsize=8)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(len(labels)), [label[:40] for label in labels], rotation=45, ha="right", fontsize=8)
    axes.set_yticks(range(len(labels)), [label[:40] for label in labels], fontsize=8)
    axes.set_xlabel("predicted")
    axes.set_ylabel("label of the row")
    axes.set_title(title[:40], fontsize=10)
