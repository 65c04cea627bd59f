"""`data.columns` makes rows of a file's columns, or names the columns that the file lacks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorakit.data.pairs import TEXTS
from lorakit.data.row_files import BadRow
from lorakit.data.row_formats import FORMATS
from lorakit.data.row_settings import RowSettings, map_columns
from lorakit.errors import DataError, RecipeError
from lorakit.recipe import load_recipe
from lorakit.recipe.data import SourceSection
from tests.helpers.rows import tokenize_rows, write_rows

ROW = {"question": "2+2?", "answer": "4", "level": 1, "hint": None}


def settings(columns: dict[str, str], **others: Any) -> RowSettings:
    return RowSettings(64, "stop", "stop", "answer", columns=tuple(columns.items()), **others)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"prompt": "question", "completion": "answer"}, {"prompt": "2+2?", "completion": "4"}),
        (
            {"prompt": "Question ({level}): {question}\nAnswer: ", "completion": "{answer}."},
            {"prompt": "Question (1): 2+2?\nAnswer: ", "completion": "4."},
        ),
        ({"text": "{{{question}}} {answer}"}, {"text": "{2+2?} 4"}),
        ({"text": "answer", "weight": "answer"}, {"text": "4", "weight": 4.0}),  # cells of CSV are text
        ({"instruction": "question", "input": "hint", "output": "answer"}, {"instruction": "2+2?", "output": "4"}),
    ],
)
def test_a_key_has_the_value_of_its_column_or_its_template(columns: dict[str, str], expected: dict[str, str]) -> None:
    assert map_columns(ROW, tuple(columns.items())) == expected


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"prompt": "qestion"}, "data.columns.prompt: the row has no 'qestion'; its columns: 'question', 'answer', 'level'"),
        ({"prompt": "{question} {hint}"}, "data.columns.prompt: the row has no 'hint'"),
        ({"text": "{parts}"}, "'parts' in a template is text or a number, got list"),
    ],
)  # fmt: skip
def test_a_row_that_lacks_a_column_is_refused_with_those_it_has(columns: dict[str, str], expected: str) -> None:
    bad = map_columns(ROW | ({"parts": ["a"]} if "text" in columns else {}), tuple(columns.items()))
    assert isinstance(bad, BadRow)
    assert expected in str(bad)


def test_other_columns_are_counted_as_not_read_and_a_column_of_no_row_is_an_error(
    tmp_path: Path, tokenizer: Any
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [ROW, ROW | {"system": "be short", "grade": False}])
    chat = {"instruction": "question", "output": "answer"}

    counts = tokenize_rows(str(rows), "train", tokenizer, settings({**chat, "system": "system"})).counts

    assert counts.unread == {"level": 2, "grade": 1}
    assert counts.mapped == {"question": 2, "answer": 2, "system": 1}
    with pytest.raises(DataError, match=r"no row of .*rows\.jsonl has 'sistem'; its columns: .*'system'"):
        tokenize_rows(str(rows), "train", tokenizer, settings({**chat, "system": "sistem"}))


def test_a_row_of_columns_has_the_tokens_of_the_row_that_they_make(tmp_path: Path, tokenizer: Any) -> None:
    mapped = write_rows(tmp_path / "mapped.jsonl", [ROW])
    plain = write_rows(tmp_path / "plain.jsonl", [{"prompt": "Q: 2+2? A: ", "completion": "4"}])
    columns = {"prompt": "Q: {question} A: ", "completion": "answer"}

    one = tokenize_rows(str(mapped), "train", tokenizer, settings(columns))
    two = tokenize_rows(str(plain), "train", tokenizer, settings({}))
    other = tokenize_rows(str(mapped), "train", tokenizer, settings({**columns, "prompt": "question"}))

    assert one.digest == two.digest
    assert one.digest != other.digest  # and was not read from the cache of the first columns


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('{prompt: "{question"}', "data.columns: prompt: expected '}' before end of string; write a brace"),
        ('{prompt: "{}"}', "in braces stands a column's name alone"),
        ('{prompt: "{a!r}"}', "in braces stands a column's name alone"),
        ('{prompt: "{{a}}"}', "names no column"),
        ("{promt: a}", "got 'promt'. Nearest: 'prompt'"),
    ],
)
def test_columns_that_cannot_be_are_refused_with_the_recipe(
    recipe: Callable[..., Path], value: str, expected: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe(), (f"data.columns={value}",))
    assert expected in str(caught.value)


def test_columns_name_every_key_that_rows_may_have() -> None:
    keys = {key for form in FORMATS for key in (*form.required, *form.optional)} | {
        "weight",
        "chosen",
        "rejected",
        "label",
        *TEXTS,
    }
    schema = SourceSection.model_json_schema()["properties"]["columns"]["anyOf"][0]
    assert set(schema["propertyNames"]["enum"]) == keys
