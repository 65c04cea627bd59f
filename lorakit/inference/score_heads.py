"""Score the heads of adapters on held-out rows: right labels, pairs that are ranked right, or errors of numbers."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from lorakit.data.dataset import TokenDataset
from lorakit.data.load import OpenProgress, tokenize_file
from lorakit.data.row_settings import RowSettings
from lorakit.files.atomic import write_file
from lorakit.files.text import columns, say_lines
from lorakit.inference.adapted_model import AdaptedModel, head_for
from lorakit.patch.own_head import OwnHead

MAX_CONFUSED: Final = 12  # labels, for a table of all pairs of them
ANY_LENGTH: Final = 1 << 20  # tokens of a row, of a base with any number of positions


@dataclass(frozen=True)
class HeadScore:
    """An adapter's answers to the rows of a file."""

    path: str
    adapter: str
    head: OwnHead
    rows: TokenDataset
    answers: list[tuple[str, Any, Any]]
    """(row's location, expected, predicted), of several labels tuples; of a reward those of both answers of a pair"""

    @property
    def is_reward(self) -> bool:
        return self.head.kind is None

    @property
    def share(self) -> float:
        """Share of labels, or of the order of pairs, that are right."""
        right = sum(bool(one == other if self.head.labels else one > other) for _, one, other in self.answers)
        return right / len(self.answers)

    def errors(self) -> tuple[float, float]:
        """Return the root of the mean squared error of numbers, and Pearson's correlation; NaN of equal numbers."""
        expected, predicted = (np.array(side, np.float64) for side in list(zip(*self.answers, strict=True))[1:])
        spread = expected.std() * predicted.std()
        covariance = np.mean((expected - expected.mean()) * (predicted - predicted.mean()))
        return float(np.sqrt(np.mean((expected - predicted) ** 2))), float(covariance / spread) if spread else math.nan

    def confusion(self) -> tuple[str, Sequence[str], Counter[tuple[str, str]]] | None:
        """Return a title, the labels, and the rows of each (expected, predicted); None unless rows have one label."""
        if not self.head.labels or self.head.has_several:
            return None
        counts = Counter((expected, predicted) for _, expected, predicted in self.answers)
        return f"{self.adapter}: {self.share:.1%} of {len(self.answers):,} right", self.head.labels, counts

    def f1(self, label: str) -> tuple[float, float, float]:
        """Return precision, recall and F1 of a label; 0 where there is none of it."""
        both = [(label in as_labels(one), label in as_labels(other)) for _, one, other in self.answers]
        right = sum(expected and predicted for expected, predicted in both)
        of_rows, of_answers = map(sum, zip(*both, strict=True))
        return right / max(1, of_answers), right / max(1, of_rows), 2 * right / max(1, of_rows + of_answers)


def score_heads(
    model: AdaptedModel, data: Mapping[str, Sequence[str]], settings: RowSettings, progress: OpenProgress
) -> list[HeadScore]:
    """Return the score of each adapter on the rows of each file. data: file -> adapters.

    Raises DataError: bad rows. LorakitError: an adapter has no head, or a row does not fit the base's positions.
    """
    scores = []
    for path, name in [(path, name) for path, names in data.items() for name in names]:
        codec = model.codec(model.adapter(name))
        head = head_for(codec.head, None)
        kind: Any = head.kind
        own = replace(settings, labels=head.labels, problem_type=kind, pairs=kind is None)
        own = replace(own, template_kwargs=codec.template_kwargs)
        # one token more is for the label
        own = replace(own, max_tokens=int(min(codec.limit, ANY_LENGTH)) + 1)
        own = replace(own, on_long_rows="drop" if settings.on_bad_rows == "skip" else "stop")
        rows = tokenize_file(path, codec.tokenizer, own, progress, "")
        ids = [rows.ids(row).tolist() for row in range(len(rows))]
        texts = [one[:-1] for one in ids]
        if head.labels:
            predicted: list[Any] = [
                one.labels if head.has_several else one.label for one in model.classify(texts, name)
            ]
        else:
            predicted = model.reward(texts, name)
        if own.head_labels is not None:
            expected: list[Any] = [own.head_labels.label(one[-1]) for one in ids]
        else:
            expected, predicted = predicted[::2], predicted[1::2]
        locations = [rows.location(row) for row in range(0, len(rows), rows.group_size)]
        answers = list(zip(locations, expected, predicted, strict=True))
        scores.append(HeadScore(path, name, head, rows, answers))
    return scores


def write_head_answers(path: Path, scores: Sequence[HeadScore]) -> None:
    lines = []
    for one in scores:
        keys = ("row", "chosen", "rejected") if one.is_reward else ("row", "expected", "predicted")
        lines += [{"adapter": one.adapter, **dict(zip(keys, answer, strict=True))} for answer in one.answers]
    write_file(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def print_head_scores(scores: Sequence[HeadScore], say: Callable[[str], None]) -> None:
    """Print a table of all, and for each classifier what was taken for what."""
    measures = [_measures(one) for one in scores]
    names = list(dict.fromkeys(name for own in measures for name in own))
    table = [["rows of", "answered by", "rows", *names]]
    for one, own in zip(scores, measures, strict=True):
        table.append([one.path, one.adapter, str(len(one.answers)), *(own.get(name, "-") for name in names)])
    say_lines(say, columns(table, "<<" + ">" * (len(names) + 1)))
    for one in scores:
        say_lines(say, [f"{one.path}: {change}" for change in one.rows.counts.changes()])
        if one.head.labels:
            table = _label_table(one)
            say_lines(say, ["", *columns(table, "<" + ">" * (len(table[0]) - 1))])


def _measures(score: HeadScore) -> dict[str, str]:
    """Return the measures of an adapter, by their names in the table."""
    if score.head.labels:
        present = {label for _, *both in score.answers for side in both for label in as_labels(side)}
        f1 = sum(score.f1(label)[2] for label in present) / max(1, len(present))
        return {"right": f"{score.share:.1%}", "macro F1": f"{f1:.3f}"}
    if score.is_reward:
        margin = sum(chosen - rejected for _, chosen, rejected in score.answers) / len(score.answers)
        return {"right": f"{score.share:.1%}", "mean margin": f"{margin:.3f}"}
    return dict(zip(("RMSE", "correlation"), (f"{value:.3f}" for value in score.errors()), strict=True))


def as_labels(label: Any) -> tuple[Any, ...]:
    """Return the labels of a row that has one or several."""
    return label if isinstance(label, tuple) else (label,)


def _label_table(score: HeadScore) -> list[list[str]]:
    """Return a row for each label: its numbers, and how often each label was predicted for its rows."""
    labels = score.head.labels
    shown = labels if len(labels) <= MAX_CONFUSED and not score.head.has_several else ()
    counts = Counter((expected, predicted) for _, expected, predicted in score.answers)
    table = [[f"label, by {score.adapter}", "rows", "precision", "recall", "F1", *(f"as {name}" for name in shown)]]
    for label in labels:
        rows = sum(number for (expected, _), number in counts.items() if label in as_labels(expected))
        numbers = (f"{number:.3f}" for number in score.f1(label))
        table.append([label, str(rows), *numbers, *(str(counts[label, name]) for name in shown)])
    return table
