"""Evaluate by generating: the run's own model answers held-out rows, and the answers are measured.

Law: a run with these evaluations trains the same adapter, to the bit, as one without. Nothing random is drawn, no
tensor is written, and each module is in the mode in which it was. The base is in memory once.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, final

from torch import nn

from lorakit.base.from_recipe import load_recipe_tokenizer
from lorakit.base.transformers_io import generation_settings
from lorakit.data.load import LocatedRow, RowSet, row_sets
from lorakit.decoding.batch import answer_all
from lorakit.decoding.generation import Generation
from lorakit.decoding.sampling import SamplingSettings
from lorakit.decoding.slot_model import RoutedModel
from lorakit.errors import DataError
from lorakit.files.atomic import write_json
from lorakit.inference.measures import Answered, Measure, chosen_measures
from lorakit.inference.prompts import PromptCodec
from lorakit.inference.score import EvalRows, answered, listed, read_eval_rows
from lorakit.parallel import Engine
from lorakit.recipe import Recipe
from lorakit.run.record import SAMPLES, read_samples
from lorakit.slots.routing import Route
from lorakit.training.callbacks import NO_HOOKS, Hooks, restored_modes

CHUNK_ROWS: Final = 64  # rows of a process that are answered between two looks at signals
SAMPLE_ROWS: Final = 16  # rows whose answers are written to the output folder


@final
class TrainedModel(RoutedModel):
    """The model of a run as decoding calls it. Its adapter is in its layers, so routes choose nothing."""

    def __init__(self, model: nn.Module, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> None:
        self.model = model
        self.prompts = PromptCodec(model, tokenizer, kwargs=template_kwargs)
        # neutral, because transformers reads every setting from here that `generate` is not passed
        model.generation_config = generation_settings()

    def routed(self, route: Route) -> AbstractContextManager[None]:
        return nullcontext()


@final
@dataclass
class Answers:
    """The held-out rows that a run answers every `train.eval_generate` evaluations, and their measures."""

    recipe: Recipe
    model: TrainedModel
    rows: EvalRows
    measures: Mapping[str, Measure]
    source_of: Mapping[str, str]  # file:line of a row -> name of its source, if it has one

    def __str__(self) -> str:
        """Return what is answered and measured, as a line of the first summary."""
        every = self.recipe.train.eval_generate
        when = "every evaluation" if every == 1 else f"every {every} evaluations, and the last"
        rows = self.rows
        text = f"{len(rows.rows):,} held-out rows at {when}: {', '.join(self.measures)}"
        for location, problem in list(rows.problems.items())[:1]:
            text += f"; {len(rows.problems):,} left out (first {location}: {problem})"
        return "; ".join([text, *rows.notes(self.recipe.evaluation.max_new_tokens, "evaluation.max_new_tokens")])

    def are_due(self, step: int, total_steps: int) -> bool:
        """True if the evaluation of this step generates: every n-th one, and the last."""
        settings = self.recipe.train
        assert settings.eval_generate is not None
        return step % (settings.eval_every_steps * settings.eval_generate) == 0 or step >= total_steps

    def measure(
        self, engine: Engine, step: int, stop: Callable[[], bool], best_step: int | None
    ) -> dict[str, float] | None:
        """Return the measures of greedy answers to all rows, or None once `stop` is True on any rank. Collective.

        best_step: the best one so far, whose answers stay among the samples.
        """
        group = engine.group
        rows = self.rows.rows
        copies = engine.mesh.replicas  # ranks that share the weights answer the same rows, each with its part
        own = rows[copies.rank :: copies.size]
        answers = list[Answered]()
        longest = math.ceil(len(rows) / copies.size)
        for start in range(0, longest, CHUNK_ROWS):  # as often on every rank
            if group.any(stop()):
                return None
            engine.set_phase(f"step {step}: answering held-out rows, {start * copies.size} of {len(rows)} done")
            answers += group.run_on_all(partial(self._answer, own[start : start + CHUNK_ROWS]))
        parts = copies.all_gather(answers)
        predicted = [parts[index % copies.size][index // copies.size] for index in range(len(rows))]
        expected = [row.expected for row in rows]
        measures = group.run_on_rank_0(lambda: self._measured(predicted, expected))
        group.run_on_rank_0(lambda: self._write_samples(step, predicted, {0, best_step}))
        return measures

    def _measured(self, predicted: Sequence[Answered], expected: Sequence[str]) -> dict[str, float]:
        """Return measure -> value of all answers, and ``measure/source`` -> value of a source's own."""
        values = {name: measure(predicted, expected) for name, measure in self.measures.items()}
        sources = [self.source_of.get(row.location) for row in self.rows.rows]
        for source in dict.fromkeys(filter(None, sources)):
            is_own = [other == source for other in sources]
            own = list(itertools.compress(predicted, is_own)), list(itertools.compress(expected, is_own))
            values |= {f"{name}/{source}": measure(*own) for name, measure in self.measures.items()}
        return values

    def _write_samples(self, step: int, predicted: Sequence[Answered], earlier: Collection[int | None]) -> None:
        """Write the answers to the first rows, always the same ones. earlier: steps whose answers stay in the file."""
        samples = [
            {"row": row.location, "prompt": row.question.prompt, "expected": row.expected}
            | {"predicted": answer.text, "correct": answer == (row.expected, False)}
            | ({"cut": True} if answer.cut else {})
            for row, answer in itertools.islice(zip(self.rows.rows, predicted, strict=True), SAMPLE_ROWS)
        ]
        folder = Path(self.recipe.output)
        before = read_samples(folder)
        copied = {number: before[number] for number in map(str, earlier) if number in before and number != str(step)}
        write_json(folder / SAMPLES, {"step": step, "rows": samples, "earlier": copied})

    def _answer(self, rows: list[Any]) -> list[Answered]:
        codec = self.model.prompts
        limit = self.recipe.evaluation.max_new_tokens
        settings = SamplingSettings(max_tokens=limit)
        generations = [Generation(None, row.ids, settings, frozenset(codec.end_ids)) for row in rows]
        with restored_modes(self.model.model):
            self.model.model.eval()
            answer_all(self.model, generations)
        return [answered(codec, one.ids(), limit) for one in generations]


def open_answers(recipe: Recipe, folder: Path, model: nn.Module, hooks: Hooks = NO_HOOKS) -> Answers | None:
    """Return the answers of a run on the base in a folder; None without `train.eval_generate`.

    Sources take turns, so that `evaluation.num_rows` are some of each.
    Raises RunError: a measure's package is missing. DataError: no held-out row can be answered.
    """
    if recipe.train.eval_generate is None:
        return None
    settings = recipe.evaluation
    measures = chosen_measures(settings.measures, hooks.metrics)
    trained = TrainedModel(model, load_recipe_tokenizer(recipe, folder), recipe.data.chat_template_kwargs)
    source_of = dict[str, str]()

    def rows_of(one: RowSet) -> Iterator[LocatedRow]:
        for location, row in one.rows():
            if one.name is not None:
                source_of[location] = one.name
            yield location, row

    evaluation = (rows_of(one) for one in row_sets(recipe) if one.side == "eval")
    in_turn = filter(None, itertools.chain.from_iterable(itertools.zip_longest(*evaluation)))
    rows = read_eval_rows(
        trained.prompts, itertools.islice(in_turn, settings.num_rows),
        max_new_tokens=settings.max_new_tokens, ignore_keys=recipe.data.ignore_keys, measures=measures,
    )  # fmt: skip
    if not rows.rows:
        raise DataError(
            f"train.eval_generate: none of the {len(rows.problems)} held-out rows can be answered"
            f" (evaluation.max_new_tokens: {settings.max_new_tokens}):\n{listed(rows.problems)}"
        )
    return Answers(recipe, trained, rows, measures, source_of)
