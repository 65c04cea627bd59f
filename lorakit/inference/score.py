"""Score exact match on held-out rows: of a base, a merged model, or adapters on their base.

Invariant: a row is in every share of its file, or it is named or counted. Rows that cannot be asked are an error that
names them, before anything is generated, because a share of the other rows is one of another data set. Rows of weight 0
are left out, as in training; every other row counts once, whatever its weight.
"""

import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lorakit.data.chat_template import ChatTemplate, common_length
from lorakit.data.find_rows import find_sources
from lorakit.data.load import LocatedRow, OpenProgress, located_rows
from lorakit.data.row_counts import BadRows
from lorakit.data.row_files import BadRow
from lorakit.data.row_formats import Encoded, Text, to_conversation
from lorakit.data.row_settings import RowSettings
from lorakit.data.shown import shown_answers
from lorakit.data.token_cache import no_progress
from lorakit.errors import DataError, LorakitError
from lorakit.files.atomic import write_file
from lorakit.files.text import columns, count_of, say_lines
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.inference.measures import Answered, Measure, shown_value
from lorakit.inference.prompts import PromptCodec, encode
from lorakit.patch.prompting import PromptForm

SHOWN_WRONG: Final = 5  # wrong answers of one adapter on one file
SHOWN_CHARACTERS: Final = 60  # of an answer, in a line of the terminal


@dataclass(frozen=True)
class Question:
    """A prompt and its expected answer."""

    prompt: str | list[dict[str, Any]]  # text that is given unchanged, or messages for the chat template
    tools: list[Any] | None
    answer: str
    weight: float = 1.0  # weight of the row in training
    num_trained: int = 1  # answers of the row that training has as labels


def parse_question(row: Any, template: ChatTemplate, ignore: Collection[str] = ()) -> Question:
    """Parse a row's question: its prompt as it is asked in use, and the answer that training has as labels.

    A conversation asks for its last answer that carries the loss; a row of plain text with its prompt unchanged.
    Raises BadRow: training refuses it, or it has no prompt or no answer that is found exactly. ``ignore``: keys.
    """
    parsed = to_conversation(row, ignore)
    if isinstance(parsed, Encoded):
        raise BadRow("a row of token ids has no prompt to ask with; use rows of text or messages")
    if isinstance(parsed, Text):
        if not parsed.prompt.strip():
            raise BadRow("plain text without a prompt has nothing to ask; use prompt + completion rows")
        return Question(parsed.prompt, None, parsed.completion, parsed.weight)
    if not any(parsed.trained):
        raise BadRow("has no answer to compare with: no assistant message that carries the loss")
    _, (answer,) = shown_answers(template, parsed, last_only=True)
    if answer.index == 0:
        raise BadRow("begins with its answer, so there is nothing to ask")
    # not the message's content, because templates add to it, such as empty thinking, or the form of a tool call
    prompt = list(parsed.messages[: answer.index])
    return Question(prompt, parsed.tools, answer.content, parsed.weight, sum(parsed.trained))


@dataclass(frozen=True)
class EvalRow:
    location: str  # file:line
    question: Question
    ids: list[int]  # tokens of the prompt
    expected: str  # the answer as the tokenizer decodes it, without white space around it
    answer_tokens: int  # of the expected answer, without its end token


@dataclass(frozen=True)
class EvalRows:
    """The rows of one file, in its order."""

    rows: list[EvalRow]
    problems: dict[str, str]  # file:line of a row that cannot be asked -> the reason
    zero_weight: list[str]  # file:line of rows of weight 0, which are left out

    def notes(self, max_new_tokens: int, key: str) -> Iterator[str]:
        """Yield how many answers are not asked for, and how many are too long to be generated in full, if any are."""
        if (total := sum(row.question.num_trained for row in self.rows)) > len(self.rows):
            yield f"{len(self.rows):,} of {total:,} answers are asked: the last of each conversation"
        # at equality the end token is not generated
        if number := sum(row.answer_tokens >= max_new_tokens for row in self.rows):
            enough = 1 + max(row.answer_tokens for row in self.rows)
            yield (
                f"{number:,} of {len(self.rows):,} expected answers are longer than {key} {max_new_tokens}: their"
                f" answers are cut, and no exact match; {enough} is enough for all"
            )


@dataclass(frozen=True)
class Prediction:
    """The answer to a row."""

    row: EvalRow
    answer: Answered

    @property
    def correct(self) -> bool:
        """True if the answer is the expected one exactly, white space around it aside, and was not cut."""
        return self.answer == Answered(self.row.expected)


ALL_ROWS: Final = RowSettings()
NO_MEASURES: Final[Mapping[str, Measure]] = {}


@dataclass(frozen=True)
class ScoredFiles:
    """The answers to the rows of each file."""

    answers: Mapping[tuple[str, str | None], list[Prediction]]  # by file and adapter, which is None for the base
    rows: Mapping[str, EvalRows]  # file -> its rows, and why others were left out
    max_new_tokens: int  # of the longest answer


def score(
    model: AdaptedModel,
    data: Mapping[str, Sequence[str | None]],
    settings: RowSettings = ALL_ROWS,
    *,
    max_new_tokens: int = 128,
    measures: Mapping[str, Measure] = NO_MEASURES,
    progress: OpenProgress = lambda: nullcontext(no_progress),
) -> ScoredFiles:
    """Return the greedy answers to the rows of each file in ``data``.

    ``data``: file -> adapters that answer its rows, None for the base. ``settings``: of the rows of all files.
    ``measures``: a row whose answer one cannot measure cannot be asked. ``progress``: opens a display of answers.
    Raises DataError: rows that cannot be asked, by the first ten reasons; or a file without rows.
    """

    def read(path: str, codec: PromptCodec) -> EvalRows:
        rows = located_rows(find_sources(path, "test"), settings)
        keys = settings.ignore_keys
        return read_eval_rows(codec, rows, max_new_tokens=max_new_tokens, ignore_keys=keys, measures=measures)

    rows_of = _rows_of_each(model, data, read)
    eval_rows = {path: rows_of[path, adapters[0]] for path, adapters in data.items()}
    _check(eval_rows, settings)
    total = sum(len(rows.rows) for rows in rows_of.values())
    counter = itertools.count(1)
    predictions = {}
    with progress() as show:
        for (path, adapter), rows in rows_of.items():
            codec = model.codec(model.adapter(adapter))
            prompts = [row.ids for row in rows.rows]
            answers = model.generate_ids(
                prompts, adapter, max_new_tokens=max_new_tokens, on_answer=lambda: show(next(counter), total)
            )
            texts = [answered(codec, ids, max_new_tokens) for ids in answers]
            predictions[path, adapter] = list(map(Prediction, rows.rows, texts))
    return ScoredFiles(predictions, eval_rows, max_new_tokens)


def _rows_of_each(
    model: AdaptedModel, data: Mapping[str, Sequence[str | None]], read: Callable[[str, PromptCodec], EvalRows]
) -> dict[tuple[str, str | None], EvalRows]:
    """Return (file, adapter) -> its rows. A row that cannot be asked in the tokens of one adapter is asked of none."""
    codecs = {name: model.codec(model.adapter(name)) for names in data.values() for name in names}
    rows_of = {}
    for path, names in data.items():
        # adapters without new tokens, trained on rows of one form, share a codec
        by_codec = {codec: read(path, codec) for codec in dict.fromkeys(codecs[name] for name in names)}
        problems = {location: text for rows in by_codec.values() for location, text in rows.problems.items()}
        for name in names:
            rows = by_codec[codecs[name]]
            common = [row for row in rows.rows if row.location not in problems]
            rows_of[path, name] = EvalRows(common, problems, rows.zero_weight)
    return rows_of


def read_eval_rows(
    codec: PromptCodec,
    rows: Iterable[LocatedRow],
    *,
    max_new_tokens: int = 128,
    ignore_keys: Collection[str] = (),
    measures: Mapping[str, Measure] = NO_MEASURES,
) -> EvalRows:
    """Return rows with their prompts and answers. One whose answer a measure cannot be of is a problem."""
    template = ChatTemplate(codec.tokenizer, kwargs=codec.template_kwargs)
    read = EvalRows([], {}, [])
    for location, row in rows:
        try:
            question = parse_question(row, template, ignore_keys)
            if question.weight == 0:
                read.zero_weight.append(location)
                continue
            ids = codec.token_ids(question.prompt, PromptForm(raw=True), question.tools)
            answer_ids = codec.until_end(encode(codec.tokenizer, question.answer))
            if not (expected := codec.decode(answer_ids).strip()):
                raise BadRow("its answer has no text that the tokenizer can write")
            codec.check_ids(ids, max_new_tokens)
            if problems := [one.refusal for one in measures.values() if one.read(expected) is None]:
                raise BadRow(problems[0])
            read.rows.append(EvalRow(location, question, ids, expected, len(answer_ids)))
        except (BadRow, LorakitError) as problem:
            read.problems[location] = str(problem)
    return read


def answered(codec: PromptCodec, ids: list[int], max_new_tokens: int) -> Answered:
    """Return the text of an answer's tokens up to its end token, without white space around it."""
    return Answered(codec.decode(ids).strip(), cut=len(ids) >= max_new_tokens)


def _check(eval_rows: Mapping[str, EvalRows], settings: RowSettings) -> None:
    problems = {location: problem for rows in eval_rows.values() for location, problem in rows.problems.items()}
    if problems and settings.on_bad_rows == "stop":
        total = sum(len(rows.problems) + len(rows.rows) + len(rows.zero_weight) for rows in eval_rows.values())
        raise DataError(
            f"data: {len(problems)} of {total} rows cannot be asked:\n{listed(problems)}\nFix them, or leave them out,"
            " named and counted, with --on-bad-rows skip. --columns and --ignore-keys are data.columns and"
            " data.ignore_keys here; of pairs --measure loss alone says which answers rank higher"
        )
    for path, rows in eval_rows.items():
        if not rows.rows:
            zero = f", {len(rows.zero_weight)} of weight 0" if rows.zero_weight else ""
            reasons = f"\n{listed(rows.problems)}" if rows.problems else ""
            raise DataError(f"{path}: no rows to score{zero}{reasons}")


def listed(problems: Mapping[str, str]) -> str:
    """Return a line for each of the first reasons, and the number of the other problems."""
    bad = BadRows()
    for location, problem in problems.items():
        bad.add(problem, location)
    return "  " + bad.listed(len(problems))


def write_predictions(path: Path, scores: ScoredFiles, measures: Mapping[str, Measure]) -> None:
    lines: list[dict[str, Any]] = []
    of_rows = {name: measure for name, measure in measures.items() if measure.of_row is not None}
    for (_, adapter), answers in scores.answers.items():
        for one in answers:
            question = one.row.question
            prompt = {"prompt" if isinstance(question.prompt, str) else "messages": question.prompt}
            lines.append(
                {"row": one.row.location, "adapter": adapter, **prompt}
                | ({"tools": question.tools} if question.tools else {})
                | {"expected": one.row.expected, "predicted": one.answer.text, "correct": one.correct}
                | ({"cut": True} if one.answer.cut else {})
                | {name: measure.row_value(one.answer, one.row.expected) for name, measure in of_rows.items()}
            )
    for rows in scores.rows.values():
        lines += [{"row": location, "left_out": problem} for location, problem in rows.problems.items()]
        lines += [{"row": location, "left_out": "weight 0"} for location in rows.zero_weight]
    write_file(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def print_scores(scores: ScoredFiles, measures: Mapping[str, Measure], say: Callable[[str], None] = print) -> None:
    """Print a table of the measures, the first wrong answers, and the rows that have a weight or were left out."""
    shown = {name: measure for name, measure in measures.items() if name != "exact_match"}
    table = [["exact match", "answered by", "right", "rows", "share", *shown]]
    for (path, adapter), answers in scores.answers.items():
        num_right = sum(answer.correct for answer in answers)
        given = [answer.answer for answer in answers], [answer.row.expected for answer in answers]
        values = [shown_value(name, measure(*given)) for name, measure in shown.items()]
        cells = [str(num_right), str(len(answers)), f"{num_right / len(answers):.1%}"]
        table.append([path, adapter or "base", *cells, *values])
    say_lines(say, columns(table, "<<" + ">" * (3 + len(shown))))
    for (path, adapter), answers in scores.answers.items():
        if adapter is None and any(name is not None for file, name in scores.answers if file == path):
            continue  # of the base alone, not beside those of adapters
        _print_wrong(path, adapter, [answer for answer in answers if not answer.correct], say)
    for path, rows in scores.rows.items():
        for note in rows.notes(scores.max_new_tokens, "--max-new-tokens"):
            say(f"\n{path}: {note}")
        if zero := len(rows.zero_weight):
            say(f"\n{count_of(zero, 'row')} of weight 0 left out of {path}")
        if other := sum(row.question.weight != 1 for row in rows.rows):
            say(f"\n{count_of(other, 'row')} with another weight than 1 in {path}; each counts once here")
        if rows.problems:
            total = len(rows.rows) + len(rows.problems) + len(rows.zero_weight)
            say(f"\nleft out {len(rows.problems)} of {total} rows of {path}, which cannot be asked:")
            say(listed(rows.problems))


def _print_wrong(path: str, adapter: str | None, wrong: Sequence[Prediction], say: Callable[[str], None]) -> None:
    if wrong:
        say(f"\nwrong answers of {adapter or 'the base'} on {path}: {len(wrong)}")
    for one in wrong[:SHOWN_WRONG]:
        expected, got = _shortened(one.row.expected, one.answer.text)
        cut = " (cut at --max-new-tokens)" if one.answer.cut else ""
        say(f"  {one.row.location}: expected {expected}, got {got}{cut}")
    if len(wrong) > SHOWN_WRONG:
        say(f"  ... and {len(wrong) - SHOWN_WRONG} more (--predictions FILE writes all answers)")


def _shortened(expected: str, got: str) -> list[str]:
    """Return both texts quoted on one line, cut so that their first difference is shown."""
    common = common_length(expected, got)
    start = common - SHOWN_CHARACTERS // 3 if common > SHOWN_CHARACTERS // 2 else 0
    stop = start + SHOWN_CHARACTERS
    before = "..." if start else ""
    return [f"{before}{text[start:stop]!r}{'...' if len(text) > stop else ''}" for text in (expected, got)]
