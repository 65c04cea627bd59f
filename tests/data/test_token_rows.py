"""Rows of token ids are taken as they are: no template, no begin or end token, and labels where the row has them."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from lorakit.cli import main
from lorakit.data.chat_template import ChatTemplate
from lorakit.data.encode import Encoder
from lorakit.data.row_files import BadRow
from lorakit.data.row_formats import Encoded
from lorakit.data.row_settings import RowSettings
from lorakit.inference.score import parse_question
from tests.helpers.rows import chat, tokenize_rows, write_rows

IDS = [5, 6, 7, 8]
SETTINGS = RowSettings(64, "stop", "stop", "answer")


@pytest.mark.parametrize(
    "labels",
    [
        {"labels": [-100, -100, 7, 8]},
        {"mask": [0, 0, 1, 1]},
        {"loss_mask": [False, False, True, True]},
        {"labels": [-100, -100, 7, 8], "attention_mask": [1, 1, 1, 1], "id": 3},
        {"labels": "[-100, -100, 7, 8]", "input_ids": "[5, 6, 7, 8]"},
    ],
    ids=str,
)
def test_a_row_of_token_ids_is_taken_as_it_is(tokenizer: Any, labels: dict[str, Any]) -> None:
    row = {"input_ids": IDS, "weight": 2, **labels}
    (encoded,) = Encoder(tokenizer, RowSettings())(row)
    assert (encoded.ids, encoded.label_mask, encoded.weight) == (IDS, [False, False, True, True], 2)
    assert not encoded.plain  # nothing says how the model is prompted
    assert Encoder(tokenizer, RowSettings(loss_on="all"))(row)[0].label_mask == [True] * 4


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"input_ids": IDS}, "input_ids: beside them one of labels (-100 for a token without loss"),
        ({"input_ids": IDS, "mask": [1] * 4, "labels": IDS}, "got labels and mask"),
        ({"input_ids": IDS, "mask": [1] * 3}, "mask: has 3 values, and input_ids 4"),
        ({"input_ids": IDS, "labels": [6, 7, 8, -100]}, "labels: value 1 is 6 for the token 5; labels are not shifted"),
        ({"input_ids": IDS, "mask": [0, 0, 0, 2]}, "mask: whole numbers from 0 to 1 expected, got 2"),
        ({"input_ids": [1.5], "mask": [1]}, "input_ids: whole numbers from 0 to 2147483647 expected, got 1.5"),
        ({"input_ids": [-1, 2], "mask": [1, 1]}, "input_ids: whole numbers from 0 to 2147483647 expected, got -1"),
        ({"input_ids": 7, "mask": [1]}, "input_ids: a list expected, got int"),
        ({"input_ids": IDS, "mask": [1] * 4, "attention_mask": [0, 1, 1, 1]}, "attention_mask: 0 for some tokens"),
        ({"input_ids": IDS, "mask": [1] * 4, "weights": [0.5] * 3}, "weights: has 3 values, and input_ids 4"),
        ({"input_ids": IDS, "mask": [1] * 4, "weights": [1, -0.5, 1, 1]}, "weights: numbers from 0 to 1e+30 expected, got -0.5"),
        ({"input_ids": IDS, "mask": [1] * 4, "weights": [1, math.nan, 1, 1]}, "to 1e+30 expected, got nan"),
        ({"input_ids": IDS, "mask": [1] * 4, "weights": [1, math.inf, 1, 1]}, "to 1e+30 expected, got inf"),
        ({"input_ids": IDS, "mask": [1] * 4, "weights": [1, "2", 1, 1]}, "to 1e+30 expected, got '2'"),
        ({"input_ids": IDS, "mask": [1] * 4, "weights": 0.5}, "weights: a list expected, got float"),
        ({"input_ids": IDS, "mask": [1] * 4, "weights": [1, 0, 0, 0]}, "nothing to learn"),
        ({"text": "a", "weights": [1]}, "weights: a weight for each token goes with `input_ids` alone"),
        ({"input_ids": IDS, "mask": [1, 0, 0, 0]}, "nothing to learn"),
        ({"input_ids": [], "mask": []}, "nothing to learn"),
        ({"text": "a", "input_ids": IDS}, "input_ids: not a key that is read here"),
        ({"input_ids": IDS, "mask": [1] * 4, "token_type_ids": [0] * 4}, "token_type_ids: not a key that is read"),
    ],
    ids=str,
)  # fmt: skip
def test_token_rows_that_cannot_be_trained_on_are_refused_with_the_reason(
    tokenizer: Any, row: Any, expected: str
) -> None:
    with pytest.raises(BadRow) as caught:
        Encoder(tokenizer, RowSettings())(row)
    assert expected in str(caught.value)
    assert "[weights]" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "label_mask", "weights"),
    [
        ({"weights": [9, 9, 0.5, 2]}, [False, False, True, True], [0, 0, 0.5, 2]),
        ({"weights": [0, 0, 0, 2]}, [False, False, False, True], [0, 0, 0, 2]),  # of weight 0, which is no label
        ({"weights": [1e-50, 1e-50, 1e-50, 2]}, [False, False, False, True], [0, 0, 0, 2]),  # 0 in float32
        ({"weights": "[0, 0, 1, 1]"}, [False, False, True, True], None),
        ({"weights": []}, [False, False, True, True], None),
    ],
    ids=str,
)
def test_weights_are_those_of_the_labels(
    tokenizer: Any, given: Any, label_mask: list[bool], weights: list[float] | None
) -> None:
    row = {"input_ids": IDS, "mask": [0, 0, 1, 1], "weight": 2, **given}
    (encoded,) = Encoder(tokenizer, RowSettings())(row)
    assert (encoded.label_mask, encoded.token_weights, encoded.weight) == (label_mask, weights, 2)


def test_every_row_of_a_table_has_its_own_weights(tmp_path: Path, tokenizer: Any) -> None:
    """Also where rows of earlier and later chunks bring none, and where a row is cut."""
    plain = [{"input_ids": [5, 6, 7 + index % 5], "mask": [0, 1, 1]} for index in range(700)]
    weighted = {300: [1.0, 0.5, 2.0], 310: [1.0, 1.0, 0.25], 321: [1.0, 0.5, 2.0]}
    rows = [row | ({"weights": weighted[index]} if index in weighted else {}) for index, row in enumerate(plain)]
    rows[310] |= {"weight": 4}
    rows[320] = {"input_ids": [5, 6, 7, 8], "mask": [1] * 4, "weights": [1, 3, 1, 9]}
    settings = RowSettings(3, "truncate", "stop", "answer")
    table = tokenize_rows(str(write_rows(tmp_path / "rows.jsonl", rows)), "train", tokenizer, settings)
    expected = weighted | {310: [4.0, 4.0, 1.0], 320: [1.0, 3.0, 1.0]}
    assert table.counts.token_weighted == 4
    for index in range(len(rows)):
        labels = table.label_mask(index)
        wanted = expected.get(index, [1.0] * 3)
        assert table.token_weights(index)[labels].tolist() == [
            w for w, is_label in zip(wanted, labels, strict=True) if is_label
        ]


def test_weights_of_1_are_the_same_rows_as_none(tmp_path: Path, tokenizer: Any) -> None:
    def digest(name: str, **keys: Any) -> str:
        rows = [{"input_ids": IDS, "mask": [0, 1, 1, 1], **keys}]
        return tokenize_rows(str(write_rows(tmp_path / name, rows)), "train", tokenizer, SETTINGS).digest

    without = digest("none.jsonl")
    assert digest("ones.jsonl", weights=[0, 1, 1, 1]) == without
    assert len({without, digest("2.jsonl", weights=[0, 2, 1, 1]), digest("3.jsonl", weights=[0, 1, 2, 1])}) == 3


def test_weights_of_a_column_are_shown_by_check(
    recipe: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], tokenizer: Any
) -> None:
    ids = tokenizer("one two three", add_special_tokens=False)["input_ids"]
    parts = [tokenizer.decode([token]) for token in ids]
    number = len(ids)
    rows = [
        {"input_ids": ids, "mask": [1] * number, "w": [1.0] * (number - 1) + [0.5]},
        {"input_ids": ids, "mask": [1] * number},
    ]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    columns = {"input_ids": "input_ids", "mask": "mask", "weights": "w"}
    path = recipe(data={"train": str(file), "eval": None, "columns": columns}, train={"steps": 4})
    marked = f"{parts[0]}[[{tokenizer.decode(ids[1:-1])}]][[{parts[-1]}]]*0.5"
    for options in (), ("--row", f"{file}:1"):
        assert main(["check", str(path), *options]) == 0
        shown = capsys.readouterr().out.splitlines()
        assert marked in shown
        assert "note       train: weights: of label tokens, other than 1 in 1 of 2 rows" in shown


def test_rows_that_differ_in_weights_alone_are_on_one_side_of_the_split() -> None:
    rows = [[{"input_ids": [5, index], "mask": [1, 1], "weights": [1, w]} for w in (1, 2)] for index in range(40)]
    columns = (("input_ids", "input_ids"), ("mask", "mask"), ("weights", "weights"))
    for names in ((), columns):
        held_out = RowSettings(columns=names, eval_share=0.5, eval_side=True)
        sides = [{held_out.is_on_side(row) for row in pair} for pair in rows]
        assert all(len(each) == 1 for each in sides)
        assert {True, False} == set().union(*sides)


def test_the_tokens_of_a_conversation_are_the_row_of_that_conversation(tmp_path: Path, tokenizer: Any) -> None:
    """The table of a file that another program tokenised is that of the conversations."""
    rows = [chat(f"say {i}", f"so {i}") for i in range(5)]
    encoded: list[Encoded] = [Encoder(tokenizer, RowSettings())(row)[0] for row in rows]
    table = pa.Table.from_pylist([
        {"ids": one.ids, "y": [i if m else -100 for i, m in zip(one.ids, one.label_mask, strict=True)]}
        for one in encoded
    ])  # fmt: skip
    pyarrow.parquet.write_table(table, tmp_path / "tokens.parquet")
    write_rows(tmp_path / "rows.jsonl", rows)
    columns = RowSettings(64, "stop", "stop", "answer", columns=(("input_ids", "ids"), ("labels", "y")))
    of_tokens = tokenize_rows(str(tmp_path / "tokens.parquet"), "train", tokenizer, columns)
    of_chats = tokenize_rows(str(tmp_path / "rows.jsonl"), "train", tokenizer, SETTINGS)
    assert of_tokens.digest == of_chats.digest


def test_ids_that_the_base_does_not_have_and_questions_are_refused(
    recipe: Callable[..., Path], tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path / "tokens.jsonl", [{"input_ids": [5, 6, 1_000_000], "mask": [0, 1, 1]}])
    path = recipe(data={"train": str(rows), "eval": None}, train={"steps": 4})
    for command in ("check", "train"):
        assert main([command, str(path)]) == 2
        assert "the rows have the token id 1000000, by the tokenizer or as input_ids" in capsys.readouterr().err
    with pytest.raises(BadRow, match="a row of token ids has no prompt to ask with"):
        parse_question(json.loads(rows.read_text()), ChatTemplate(tokenizer))
