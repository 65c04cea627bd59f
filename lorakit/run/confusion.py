"""Draw how often each label was taken for each, a square for each adapter and file."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from lorakit.errors import LorakitError
from lorakit.inference.score_heads import HeadScore
from lorakit.run.charts import STYLE

MAX_LABELS: Final = 60  # that can be read on a picture
INK: Final = 0.6  # share of a row's largest count from which on numbers are white


def draw_confusion(path: Path, scores: Sequence[HeadScore]) -> None:
    """Write a picture of all scores with one label a row. Raises LorakitError: there is none."""
    import matplotlib
    from matplotlib.figure import Figure

    drawn = [one for one in scores if 0 < len(one.head.labels) <= MAX_LABELS and not one.head.has_several]
    if not drawn:
        raise LorakitError(f"--confusion: no adapter has one label a row, of up to {MAX_LABELS}")
    side = max(3.0, 0.45 * max(len(one.head.labels) for one in drawn) + 2)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(side * len(drawn), side), dpi=120, layout="constrained")
        for number, one in enumerate(drawn, 1):
            _draw(figure.add_subplot(1, len(drawn), number), one)
        figure.savefig(path, format="png")


def _draw(axes: Any, score: HeadScore) -> None:
    labels = score.head.labels
    counts = Counter((expected, predicted) for _, expected, predicted in score.answers)
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
    title = f"{score.adapter}: {score.share:.1%} of {len(score.answers):,} right"
    axes.set_title(title[:40], fontsize=10)
