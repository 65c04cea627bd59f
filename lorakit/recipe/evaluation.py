"""The recipe's `evaluation` section: how held-out rows are answered and measured while a run trains."""

from collections.abc import Iterator
from typing import Literal, get_args

from lorakit.errors import did_you_mean
from lorakit.recipe.section import Count, Name, Section

MeasureName = Literal[
    "exact_match", "prefix", "numeric", "json_fields", "rouge_1", "rouge_2", "rouge_l", "bleu"
]  # fmt: skip


class EvaluationSection(Section):
    measures: tuple[MeasureName, ...] = ("exact_match",)
    """Measures of the generated answers, each from 0 to 1, with `train.eval_generate`. `exact_match`, `prefix` (the
    answer begins with the expected one), `numeric` (the last numbers are equal), `json_fields` (share of equal fields);
    `rouge_1`, `rouge_2`, `rouge_l` and `bleu` need `pip install 'lorakit[eval]'`."""
    max_new_tokens: Count = 128
    """Longest answer in tokens. A longer answer is cut, and no exact match."""
    num_rows: Count | None = 200
    """Held-out rows to answer, the first ones, of several sources equally many; null is all."""
    best: Literal["loss"] | MeasureName | Name = "loss"
    """What makes a step the best one, for `train.select` and `train.early_stopping_evals`: the held-out loss, one of
    `measures`, or a measure of your own (`--metric`), as of the evaluations that generate."""
    lower_is_better: bool | None = None
    """For a measure of your own in `best`, and required there: true if smaller values are better, else false."""

    def problems(self) -> Iterator[str]:
        if not self.measures or len(set(self.measures)) < len(self.measures):
            yield "measures: name at least one, each once"
        if self.own_best is not None:
            if self.lower_is_better is None:
                known = ("loss", *get_args(MeasureName))
                yield (
                    f"best: {self.best!r} is none of {', '.join(known)}.{did_you_mean(self.best, known)}"
                    " Of a measure of your own say lower_is_better: true or false"
                )
        elif self.lower_is_better is not None:
            yield f"lower_is_better: goes with a measure of your own, got best: {self.best}"
        elif self.best not in ("loss", *self.measures):
            yield f"best: {self.best} is not measured; add it to `measures`"

    @property
    def own_best(self) -> str | None:
        """The measure in `best` if it is a function of the caller's, else None."""
        return None if self.best in ("loss", *get_args(MeasureName)) else self.best
