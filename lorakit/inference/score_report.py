"""Print the scores of answers: a table while they come, then the wrong ones and what was left out."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Final, final

from lorakit.inference.measures import Measure, shown_value
from lorakit.inference.score import EvalRows, Prediction, ScoredFiles, listed

SHOWN_WRONG: Final = 5
"""wrong answers of one adapter on one file"""
SHOWN_CHARACTERS: Final = 60
"""of an answer, in a line of the terminal"""


@final
class ScoreReport:
    """The report of `lorakit score`. data, measures: as of ``score``. say: prints a line."""

    def __init__(
        self,
        data: Mapping[str, Sequence[str | None]],
        measures: Mapping[str, Measure],
        say: Callable[[str], None] = print,
    ) -> None:
        self._say = say
        self._measures = {name: measure for name, measure in measures.items() if name != "exact_match"}
        self._width = max(map(len, [*data, "exact match"]))
        self._names = max(len(name or "") for adapters in data.values() for name in [*adapters, "answered by"])
        self._has_head = False

    def add(self, path: str, adapter: str | None, answers: Sequence[Prediction]) -> None:
        """Print the line of a file and an adapter; as ``on_answers`` of ``score``."""
        if not self._has_head:
            self._line("exact match", "answered by", "right", "rows", "share", {name: name for name in self._measures})
            self._has_head = True
        num_right = sum(answer.correct for answer in answers)
        predicted = [answer.text for answer in answers]
        expected = [answer.row.expected for answer in answers]
        values = {name: shown_value(name, measure(predicted, expected)) for name, measure in self._measures.items()}
        share = f"{num_right / len(answers):.1%}"
        self._line(path, adapter or "base", str(num_right), str(len(answers)), share, values)

    def finish(self, scores: ScoredFiles) -> None:
        """Print the first wrong answers, and the rows that have a weight or were left out."""
        for (path, adapter), answers in scores.answers.items():
            if adapter is None and any(name is not None for file, name in scores.answers if file == path):
                continue  # of the base alone, not beside those of adapters
            _print_wrong(path, adapter, [answer for answer in answers if not answer.correct], self._say)
        for path, rows in scores.rows.items():
            _print_weights(path, rows, self._say)
            if rows.problems:
                total = len(rows.rows) + len(rows.problems) + len(rows.zero_weight)
                self._say(f"\nleft out {len(rows.problems)} of {total} rows of {path}, which cannot be asked:")
                self._say(listed(rows.problems))

    def _line(self, path: str, adapter: str, right: str, rows: str, share: str, values: Mapping[str, str]) -> None:
        cells = "".join(f"  {value:>{max(6, len(name))}}" for name, value in values.items())
        self._say(f"{path:<{self._width}}  {adapter:<{self._names}}  {right:>6}  {rows:>6}  {share:>6}{cells}")


def _print_weights(path: str, rows: EvalRows, say: Callable[[str], None]) -> None:
    """Print how many rows have a weight, and what it does here."""
    lines = []
    if zero := len(rows.zero_weight):
        lines.append(f"{zero} row{'s' if zero > 1 else ''} of weight 0 left out of {path}")
    if other := sum(row.question.weight != 1 for row in rows.rows):
        lines.append(
            f"{other} row{'s have' if other > 1 else ' has'} another weight than 1 in {path}; each counts once here"
        )
    if lines:
        say("\n" + "\n".join(lines))


def _print_wrong(path: str, adapter: str | None, wrong: Sequence[Prediction], say: Callable[[str], None]) -> None:
    """Print the first wrong answers, one line each, and the count of the others."""
    if not wrong:
        return
    say(f"\nwrong answers of {adapter or 'the base'} on {path}: {len(wrong)}")
    for answer in wrong[:SHOWN_WRONG]:
        expected, got = _shortened(answer.row.expected, answer.text)
        say(f"  {answer.row.location}: expected {expected}, got {got}")
    if len(wrong) > SHOWN_WRONG:
        say(f"  ... and {len(wrong) - SHOWN_WRONG} more (--predictions FILE writes all answers)")


def _shortened(expected: str, got: str) -> list[str]:
    """Return both texts quoted on one line, cut so that their first difference is shown."""
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(expected, got, strict=False)))
    start = common - SHOWN_CHARACTERS // 3 if common > SHOWN_CHARACTERS // 2 else 0
    cut = []
    for text in (expected, got):
        part = text[start : start + SHOWN_CHARACTERS]
        end = "..." if len(text) > start + SHOWN_CHARACTERS else ""
        cut.append(f"{'...' if start else ''}{part!r}{end}")
    return cut
