"""Score the heads of adapters on held-out rows: how many labels are right, or how many pairs are ranked right."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from lorakit.data.dataset import TokenDataset
from lorakit.data.load import OpenProgress, tokenize_file
from lorakit.data.row_settings import RowSettings
from lorakit.files.atomic import write_file
from lorakit.files.text import columns, say_lines
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.inference.classify import head_for

MAX_CONFUSED: Final = 12  # labels, for a table of all pairs of them
ANY_LENGTH: Final = 1 << 20  # tokens of a row, of a base with any number of positions


@dataclass(frozen=True)
class HeadScore:
    """An adapter's answers to the rows of a file."""

    path: str
    adapter: str
    labels: tuple[str, ...]  # () of a reward
    rows: TokenDataset
    answers: list[tuple[str, Any, Any]]
    """(row's location, expected, predicted), or of a reward those of a chosen and of a rejected answer"""

    @property
    def share(self) -> float:
        """Share of labels, or of the order of pairs, that are right."""
        right = sum(bool(one == other if self.labels else one > other) for _, one, other in self.answers)
        return right / len(self.answers)

    def f1(self, label: str) -> tuple[float, float, float]:
        """Return precision, recall and F1 of a label; 0 where there is none of it."""
        right = sum(expected == label == predicted for _, expected, predicted in self.answers)
        of_rows = sum(expected == label for _, expected, _ in self.answers)
        of_answers = sum(predicted == label for _, _, predicted in self.answers)
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
        labels = head_for(codec.head, None).labels
        own = replace(settings, labels=labels, pairs=not labels, template_kwargs=codec.template_kwargs)
        # one token more is for the label
        own = replace(own, max_tokens=int(min(codec.limit, ANY_LENGTH)) + 1)
        own = replace(own, on_long_rows="drop" if settings.on_bad_rows == "skip" else "stop")
        rows = tokenize_file(path, codec.tokenizer, own, progress, "")
        ids = [rows.ids(row).tolist() for row in range(len(rows))]
        texts = [one[:-1] for one in ids]
        if labels:
            expected: list[Any] = [labels[one[-1]] for one in ids]
            predicted: list[Any] = [one.label for one in model.classify(texts, name)]
        else:
            rewards = model.reward(texts, name)
            expected, predicted = rewards[::2], rewards[1::2]
        locations = [rows.location(row) for row in range(0, len(rows), rows.group_size)]
        answers = list(zip(locations, expected, predicted, strict=True))
        scores.append(HeadScore(path, name, labels, rows, answers))
    return scores


def write_head_answers(path: Path, scores: Sequence[HeadScore]) -> None:
    lines = []
    for one in scores:
        keys = ("row", "expected", "predicted") if one.labels else ("row", "chosen", "rejected")
        lines += [{"adapter": one.adapter, **dict(zip(keys, answer, strict=True))} for answer in one.answers]
    write_file(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def print_head_scores(scores: Sequence[HeadScore], say: Callable[[str], None]) -> None:
    """Print a table of all, and for each classifier what was taken for what."""
    table = [["labels and pairs", "answered by", "rows", "right", "macro F1", "mean margin"]]
    for one in scores:
        count = len(one.answers)
        present = {label for _, *both in one.answers for label in both}
        f1 = f"{sum(one.f1(label)[2] for label in present) / len(present):.3f}" if one.labels else "-"
        margin = "-" if one.labels else f"{sum(chosen - rejected for _, chosen, rejected in one.answers) / count:.3f}"
        table.append([one.path, one.adapter, str(count), f"{one.share:.1%}", f1, margin])
    say_lines(say, columns(table, "<<>>>>"))
    for one in scores:
        say_lines(say, [f"{one.path}: {change}" for change in one.rows.counts.changes()])
        if one.labels:
            table = _label_table(one)
            say_lines(say, ["", *columns(table, "<" + ">" * (len(table[0]) - 1))])


def _label_table(score: HeadScore) -> list[list[str]]:
    """Return a row for each label: its numbers, and how often each label was predicted for its rows."""
    shown = score.labels if len(score.labels) <= MAX_CONFUSED else ()
    counts = Counter((expected, predicted) for _, expected, predicted in score.answers)
    table = [[f"label, by {score.adapter}", "rows", "precision", "recall", "F1", *(f"as {name}" for name in shown)]]
    for label in score.labels:
        rows = sum(number for (expected, _), number in counts.items() if expected == label)
        numbers = (f"{number:.3f}" for number in score.f1(label))
        table.append([label, str(rows), *numbers, *(str(counts[label, name]) for name in shown)])
    return table
