"""Write metrics.jsonl, one JSON line per step or evaluation; draw the losses of one run or of several from it."""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from lorakit.files.atomic import write_file


class Metrics:
    """Writer of metrics.jsonl. When a run resumes, lines after the last checkpoint are removed first."""

    def __init__(self, path: Path, last_step: int) -> None:
        lines = [line for line in read_metrics(path) if line["step"] <= last_step]
        write_file(path, "".join(json.dumps(line) + "\n" for line in lines))
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
        self._evaluated = {line["step"] for line in lines if "eval_loss" in line}

    def write(self, values: dict[str, Any]) -> None:
        """Append one line, unless it is an evaluation that the file already has, as after a resume."""
        if "eval_loss" in values and values["step"] in self._evaluated:
            return
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a metrics file; a last line cut by a crash is skipped."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            value = json.loads(text)
        except ValueError:
            break
        if not isinstance(value, dict) or not isinstance(value.get("step"), int):
            break
        lines.append(value)
    return lines


def draw_loss(metrics: Path, picture: Path, title: str) -> None:
    """Draw loss.png: training loss (thin), its running mean, and evaluation loss, over steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_metrics(metrics)
    steps = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    evals = [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line]
    figure = Figure(figsize=(8, 4.5))
    figure.subplots_adjust(left=0.13, right=0.98, bottom=0.12, top=0.92)  # a computed layout draws everything twice
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if steps:
        x, y = zip(*steps, strict=True)
        axes.plot(x, y, color="#9ecae1", linewidth=0.8, marker="." if len(x) == 1 else None, label="step")
        axes.plot(x, running_mean(list(y)), color="#08519c", linewidth=1.6, label="step, running mean")
    if evals:
        axes.plot(*zip(*evals, strict=True), color="#d94801", marker="o", markersize=4, label="held out")
    losses = [loss for _, loss in steps + evals]
    if losses and 0 < min(losses) < max(losses):  # a logarithmic axis of one value has no length
        axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("loss per label token")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    if losses:
        axes.legend()
    figure.savefig(picture, dpi=120)


Curve = Sequence[tuple[int, float]]
"""(step, value)"""


def draw_runs(curves: Mapping[str, tuple[Curve, Curve]], picture: Path) -> None:
    """Draw the losses of several runs over steps: running means in training, and beside them the held-out losses.

    ``curves``: name of a run -> its (training, held-out) losses.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [number for number in (0, 1) if number == 0 or any(pair[1] for pair in curves.values())]
    figure = Figure(figsize=(7 * len(panels), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    for panel in panels:
        axes = figure.add_subplot(1, len(panels), panel + 1)
        for name, pair in curves.items():
            x, y = zip(*pair[panel], strict=True) if pair[panel] else ((), ())
            values = running_mean(list(y)) if panel == 0 else y
            # "_" hides a name from the legend, and "$" begins a formula
            label = f" {name}".replace("$", r"\$")
            axes.plot(x, values, linewidth=1.4, marker="o" if panel or len(x) == 1 else None, markersize=4, label=label)
        losses = [loss for pair in curves.values() for _, loss in pair[panel]]
        if losses and 0 < min(losses) < max(losses):  # a logarithmic axis of one value has no length
            axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.set_ylabel("held-out loss" if panel else "loss per label token, running mean")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(picture, dpi=120)


def running_mean(values: list[float]) -> list[float]:
    """Return for each step the mean over the steps around it: over a thirtieth of the run, and over 5 at least.

    Around it, because a mean of the steps before lies above a falling loss. It is a mean of the logarithms, because the
    axis is logarithmic.
    """
    half = max(2, len(values) // 60)
    sums = [0.0, *accumulate(math.log(max(value, 1e-12)) for value in values)]
    windows = [(max(0, step - half), min(len(values), step + half + 1)) for step in range(len(values))]
    return [math.exp((sums[stop] - sums[start]) / (stop - start)) for start, stop in windows]
