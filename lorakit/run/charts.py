"""Draw curves over steps with matplotlib: the picture of a run's loss, a report's charts, a comparison of runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

from lorakit.run.metrics import read_metrics

Curve = Sequence[tuple[int, float]]
"""(step, value)"""
THIN: Final = "#9ecae1"
MAIN: Final = "#08519c"
HELD_OUT: Final = "#d94801"
STYLE: Final = {
    "font.sans-serif": ["DejaVu Sans"],
    "path.simplify_threshold": 1.0,  # so that a long run's page stays small
    "svg.fonttype": "none",
    "svg.hashsalt": "lorakit",
}
"""matplotlib's settings: SVG with text as text, and the same bytes for the same values"""
MAX_MARKERS: Final = 60
"""points of a line that are marked; more hide the line"""


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
    """Lines over steps. y_label: below an empty title, what the values are. log: a logarithmic axis, where it fits."""

    title: str
    lines: Sequence[ChartLine]
    y_label: str = ""
    log: bool = False


def draw(charts: Sequence[Chart], file: Path | BinaryIO, form: Literal["png", "svg"], *, height: float = 4.5) -> None:
    """Draw charts side by side. Titles and labels may be any text. ``height``: inches, of 8 in width for each chart."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8 * len(charts), height), layout="constrained")
        FigureCanvasAgg(figure)
        for number, chart in enumerate(charts, 1):
            _draw_chart(figure.add_subplot(1, len(charts), number), chart)
        without_date = {"Date": None, "Creator": None, "Format": None, "Type": None} if form == "svg" else None
        figure.savefig(file, format=form, dpi=120, transparent=form == "svg", metadata=without_date)


def _draw_chart(axes: Any, chart: Chart) -> None:
    values = list[float]()
    for line in chart.lines:
        x, y = zip(*line.points, strict=True) if line.points else ((), ())
        values += y
        is_marked = len(x) == 1 or (line.marked and len(x) <= MAX_MARKERS)
        # matplotlib hides a label that begins with "_", and "$" begins a formula
        label = f" {line.label}".replace("$", r"\$")
        marker = "o" if is_marked else None
        axes.plot(x, y, color=line.color, linewidth=line.width, marker=marker, markersize=4, label=label)
    # a logarithmic axis of one value has no length, and a running mean of equal values differs in its last digits
    if chart.log and values and 0 < min(values) * 1.001 < max(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(_few_labels(min(values), max(values)))
    else:
        axes.ticklabel_format(axis="y", useOffset=False)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title(chart.title.replace("$", r"\$"))
    axes.set_xlabel("step")
    axes.set_ylabel(chart.y_label)
    axes.grid(alpha=0.3, which="both")
    if values:
        axes.legend()


def _few_labels(low: float, high: float) -> Any:
    """Return the labels between powers of ten: all of a short axis, those of 2 and 5 of a longer one, else none."""
    from matplotlib.ticker import FuncFormatter

    decades = math.log10(high / low)
    digits = (2, 3, 4, 5, 6, 8) if decades < 0.7 else (2, 5) if decades < 3 else ()

    def label(value: float, _position: int | None) -> str:
        is_shown = decades < 0.1 or round(value / 10 ** math.floor(math.log10(value))) in digits
        return f"{value:g}" if is_shown else ""

    return FuncFormatter(label)


def loss_chart(title: str, losses: Curve, eval_losses: Curve) -> Chart:
    """Return a chart of training losses (thin), their running mean, and held-out losses."""
    means = running_mean([loss for _, loss in losses])
    mean = [(step, value) for (step, _), value in zip(losses, means, strict=True)]
    lines = [
        ChartLine("step", losses, THIN, width=0.8),
        ChartLine("running mean", mean, MAIN),
        ChartLine("held out", eval_losses, HELD_OUT, marked=True),
    ]
    return Chart(title, [line for line in lines if line.points], "loss per label token", log=True)


def draw_loss(metrics: Path, picture: Path, title: str) -> None:
    """Draw loss.png from a run's metrics.jsonl."""
    lines = read_metrics(metrics)
    losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    eval_losses = [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line]
    draw([loss_chart(title, losses, eval_losses)], picture, "png")


def draw_runs(curves: Mapping[str, tuple[Curve, Curve]], picture: Path) -> None:
    """Draw the losses of several runs. ``curves``: name of a run -> its (training, held-out) losses."""
    training = []
    evaluations = []
    for name, (losses, eval_losses) in curves.items():
        means = running_mean([loss for _, loss in losses])
        training.append(ChartLine(name, [(step, mean) for (step, _), mean in zip(losses, means, strict=True)]))
        evaluations.append(ChartLine(name, eval_losses, marked=True))
    charts = [Chart("", training, "loss per label token, running mean", log=True)]
    if any(line.points for line in evaluations):
        charts.append(Chart("", evaluations, "held-out loss", log=True))
    draw(charts, picture, "png")


def running_mean(values: Sequence[float]) -> list[float]:
    """Return for each step the mean over the steps around it: over a thirtieth of the run, and over 5 at least.

    Around it, because a mean of the steps before lies above a falling loss. It is a mean of the logarithms, because the
    axis is logarithmic.
    """
    half = max(2, len(values) // 60)
    sums = [0.0, *accumulate(math.log(max(value, 1e-12)) for value in values)]
    windows = [(max(0, step - half), min(len(values), step + half + 1)) for step in range(len(values))]
    return [math.exp((sums[stop] - sums[start]) / (stop - start)) for start, stop in windows]
