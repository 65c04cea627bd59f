"""Rows that say which answers are good: no remedy trains on bad ones, and that of the documents keeps the good ones."""

import re
from pathlib import Path
from typing import Any

import datasets
import pytest

from lorakit.data.find_rows import find_sources
from lorakit.data.row_files import BadRow
from lorakit.data.row_formats import WORTH, Chat, to_conversation
from lorakit.data.row_settings import map_columns
from lorakit.data.rows import read_rows
from lorakit.errors import RecipeError
from lorakit.recipe import load_recipe
from lorakit.recipe.data import UNIGNORED_KEYS
from tests.helpers.rows import write_rows

DOCUMENT = Path(__file__).parents[2] / "docs" / "recipes.md"
ASKED = {"role": "user", "content": "hi"}
GOOD = {"role": "assistant", "content": "good"}
BAD = {"role": "assistant", "content": "bad"}
HUMAN = {"from": "human", "value": "hi"}

KTO = [
    [{"messages": [ASKED, GOOD], "label": True}, {"messages": [ASKED, BAD], "label": False}],
    [{"messages": [ASKED, GOOD], "kto_tag": True}, {"messages": [ASKED, BAD], "kto_tag": False}],
    [{"prompt": "hi", "completion": "good", "label": True}, {"prompt": "hi", "completion": "bad", "label": False}],
    [{"prompt": [ASKED], "completion": [GOOD], "label": 1}, {"prompt": [ASKED], "completion": [BAD], "label": 0}],
    [{"messages": [ASKED, GOOD], "label": 1}, {"messages": [ASKED, BAD], "label": -1}],
    [{"messages": [ASKED, GOOD], "label": "true"}, {"messages": [ASKED, BAD], "label": "false"}],
]
PAIRS = [
    [{"prompt": "hi", "chosen": "good", "rejected": "bad"}],
    [{"chosen": "good", "rejected": "bad"}],
    [{"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}],
    [{"prompt": "hi", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}],
    [{"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}],
    [
        {
            "conversations": [HUMAN],
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
        }
    ],
    [{"messages": [ASKED], "chosen": [GOOD], "rejected": [BAD]}],
    [{"instruction": "hi", "input": "", "chosen": "good", "rejected": "bad"}],
    [{"instruction": "hi", "chosen_rejected": ["good", "bad"]}],
    [{"prompt": "hi", "completion": "good", "rejected": "bad"}],
]


def refusal_of(row: Any, *ignore: str) -> str:
    with pytest.raises(BadRow) as caught:
        to_conversation(row, ignore)
    return str(caught.value)


@pytest.mark.parametrize(
    ("index", "rows"), [(0, rows) for rows in KTO if "label" in rows[0]] + [(1, PAIRS[0])], ids=str
)
def test_the_python_of_the_documents_keeps_the_good_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: int, rows: list[dict[str, Any]]
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", rows * 3)
    section = DOCUMENT.read_text().partition("**Good and bad answers.**")[2]
    exec(re.findall(r"```python\n(.*?)```", section, re.DOTALL)[index], {})
    kept = [to_conversation(row) for source in find_sources("good.jsonl", "train") for _, row in read_rows(source)]
    answers = [one.messages[-1]["content"] if isinstance(one, Chat) else one.completion for one in kept]
    assert answers == ["good"] * 3


def test_a_row_with_a_bad_answer_is_one_line_that_names_the_documents() -> None:
    for rows in (*KTO, *PAIRS, [{"messages": [ASKED], "chosen": "good", "rejected": "bad"}]):
        message = refusal_of(rows[-1])
        assert "docs/recipes.md, 'Good and bad answers'" in message
        assert "\n" not in message
        assert "ignore_keys" not in message


@pytest.mark.parametrize("rows", [*KTO, *PAIRS], ids=str)
def test_no_key_that_says_which_answers_are_good_can_be_ignored(rows: list[dict[str, Any]]) -> None:
    assert refusal_of(rows[0], *WORTH) == refusal_of(rows[0])
    marked = {"messages": [ASKED, GOOD | {"label": False}]}
    assert to_conversation(marked, ["label"]).messages[1]["label"] is False  # the check of what is shown refuses it


@pytest.mark.parametrize("key", UNIGNORED_KEYS)
def test_a_recipe_that_ignores_such_a_key_is_refused(tmp_path: Path, key: str) -> None:
    assert set(UNIGNORED_KEYS) == WORTH.keys()
    path = tmp_path / "recipe.yaml"
    path.write_text(f"base: {{model: builtin:tiny}}\ndata:\n  train: a\n  ignore_keys: [id, {key}]\noutput: out\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert f"recipe.yaml:4: data.ignore_keys: {key} says which answers are good" in str(caught.value)


@pytest.mark.parametrize("bad", [False, "False", "false"])
def test_columns_do_not_leave_a_bad_answers_label_unread(bad: Any) -> None:
    columns = (("prompt", "q"), ("completion", "a"))
    row = {"q": "hi", "a": "bad", "label": bad}
    assert "keep the good ones" in str(map_columns(row, columns))
    for other in ({**row, "label": True}, {**row, "label": 0}, {**row, "label": None}):  # 0: a class
        assert map_columns(other, columns) == {"prompt": "hi", "completion": "bad"}
