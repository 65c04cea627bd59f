"""The recipe's `evaluation` section: how held-out rows are answered and measured while a run trains."""

from typing import Literal

from pydantic import model_validator

from lorakit.recipe.section import Count, Section

MeasureName = Literal[
    "exact_match", "prefix", "numeric", "json_fields", "rouge_1", "rouge_2", "rouge_l", "bleu"
]  # fmt: skip


class EvaluationSection(Section):
    measures: tuple[MeasureName, ...] = ("exact_match",)
    """Measures of the generated answers, each from 0 to 1, with `train.eval_generate`. `exact_match`, `prefix` (the
    answer begins with the expected one), `numeric` (the last numbers are equal), `json_fields` (share of equal fields);
    `rouge_1`, `rouge_2`, `rouge_l` and `bleu` need `pip install 'lorakit[eval]'`."""
    max_new_tokens: Count = 128
    """Longest answer in tokens. Rows whose expected answer is longer are left out, and counted."""
    num_rows: Count | None = 200
    """Held-out rows to answer, the first ones, of several sources equally many; null is all."""
    best: Literal["loss"] | MeasureName = "loss"
    """What makes a step the best one, for `train.select` and `train.early_stopping_evals`: the held-out loss, or one of
    `measures`, as of the evaluations that generate."""

    @model_validator(mode="after")
    def _best_is_measured(self) -> "EvaluationSection":
        if not self.measures or len(set(self.measures)) < len(self.measures):
            raise ValueError("measures: name at least one, each once")
        if self.best not in ("loss", *self.measures):
            raise ValueError(f"best: {self.best} is not measured; add it to `measures`")
        return self
