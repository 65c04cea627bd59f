"""Rows are split, limited and mixed by functions of their content, the seed and the epoch alone."""

import itertools
import json
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lorakit.data.dataset import TokenDataset, count_shared
from lorakit.data.load import files_left_out, load_datasets
from lorakit.data.row_settings import RowSettings
from lorakit.data.sampler import BatchSampler
from lorakit.errors import DataError, RecipeError
from lorakit.recipe import load_recipe
from lorakit.run.display import row_progress
from tests.helpers.rows import chat, tokenize_rows, write_rows, write_uneven_rows

WriteRecipe = Callable[..., Path]


def load(recipe: Path, tokenizer: Any) -> tuple[TokenDataset, TokenDataset | None]:
    datasets = load_datasets(load_recipe(recipe), tokenizer, row_progress)
    return datasets["train"], datasets.get("eval")


def texts(rows: TokenDataset | None, tokenizer: Any) -> list[str]:
    assert rows is not None
    return [tokenizer.decode(rows.ids(row)) for row in range(len(rows))]


# --- a share is held out ---------------------------------------------------------------------------------------------


def test_a_row_stays_on_its_side_whatever_other_rows_there_are(
    tmp_path: Path, recipe: WriteRecipe, tokenizer: Any
) -> None:
    every = [chat(f"say {i}", f"so {i}") for i in range(400)]
    one = write_rows(tmp_path / "one.jsonl", every)
    fewer = [row | {"id": 7, "weight": 2} for row in every[::-3]]  # as they are known, from elsewhere
    (tmp_path / "two.json").write_text(json.dumps([dict(reversed(row.items())) for row in fewer]))

    train, held = (texts(rows, tokenizer) for rows in load(recipe(data={"train": str(one), "eval": 0.2}), tokenizer))
    path = recipe(data={"train": str(tmp_path / "two.json"), "eval": 0.2})
    train_2, held_2 = (texts(rows, tokenizer) for rows in load(path, tokenizer))

    assert len(train) + len(held) == 400
    assert 50 <= len(held) <= 110
    assert set(train_2) < set(train)
    assert set(held_2) < set(held)
    larger = texts(load(recipe(data={"train": str(one), "eval": 0.5}), tokenizer)[1], tokenizer)
    assert set(held) < set(larger)


def test_rows_with_the_same_content_are_on_the_same_side(tmp_path: Path, recipe: WriteRecipe, tokenizer: Any) -> None:
    rows = [{"q": f"say {i % 20}", "a": "so", "id": i, "url": str(i)} for i in range(60)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    columns = {"prompt": "{q} ", "completion": "a"}
    sides = []
    for prompt in ("{q} ", "Question: {q} "):  # another template moves none
        data = {"train": str(path), "eval": 0.3, "columns": {**columns, "prompt": prompt}}
        train, held = load(recipe(data=data), tokenizer)
        assert held is not None
        assert count_shared(train, held) == 0
        assert len(train) % 3 == len(held) % 3 == 0
        sides.append([held.location(row) for row in range(len(held))])
    assert sides[0] == sides[1]


@pytest.mark.parametrize(
    ("share", "expected"), [(1e-9, "is none of them; give a larger share"), (1 - 1e-9, "held out")]
)
def test_a_share_that_leaves_a_side_empty_is_an_error(
    recipe: WriteRecipe, rows: Path, tokenizer: Any, share: float, expected: str
) -> None:
    with pytest.raises(DataError, match=expected):
        load(recipe(data={"train": str(rows), "eval": share}), tokenizer)


def test_a_bad_row_of_a_split_file_is_counted_once(tmp_path: Path, recipe: WriteRecipe, tokenizer: Any) -> None:
    rows: list[Any] = [chat(f"say {i}", "so") for i in range(40)]
    path = write_rows(tmp_path / "rows.jsonl", [*rows, [], 3, *({"messages": i} for i in range(10))])
    train, held = load(recipe(data={"train": str(path), "eval": 0.5, "on_bad_rows": "skip"}), tokenizer)
    assert held is not None
    assert train.counts.bad + held.counts.bad == 12
    assert train.counts.rows + held.counts.rows == 40


# --- several sources -------------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(tmp_path: Path, recipe: WriteRecipe) -> Path:
    for name, number in (("a", 40), ("b", 30), ("c", 7)):
        write_uneven_rows(tmp_path / f"{name}.jsonl", number)
    sources = [
        {"path": str(tmp_path / "a.jsonl"), "weight": 0.3, "name": "few"},
        {"path": str(tmp_path / "b.jsonl"), "limit": 20},
        {"path": str(tmp_path / "c.jsonl"), "weight": 2.5},
    ]
    return recipe(data={"train": sources, "eval": None})


def order(rows: TokenDataset, epoch: int, seed: int = 0) -> list[int]:
    sampler = BatchSampler(rows, 8, 4, True, seed)
    steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
    return [row for step in steps for row in sampler.rows_of_step(step)]


def test_a_weight_is_the_number_of_passes_and_every_row_comes_equally_often(mixed: Path, tokenizer: Any) -> None:
    rows, _ = load(mixed, tokenizer)
    assert [part.rows_per_epoch for part in rows.parts] == [12, 20, 18]
    counts = np.zeros(len(rows), int)
    for epoch in range(20):
        own = np.bincount(order(rows, epoch), minlength=len(rows))
        assert [own[:40].sum(), own[40:60].sum(), own[60:].sum()] == [12, 20, 18]
        counts += own
        for part in (counts[:40], counts[40:60], counts[60:]):
            assert part.max() - part.min() <= 1
    assert counts[:40].tolist() == [6] * 40


def test_the_order_of_a_mix_is_a_function_of_seed_and_epoch(mixed: Path, tokenizer: Any) -> None:
    rows, _ = load(mixed, tokenizer)
    first = order(rows, 0)
    assert sorted(first) != sorted(order(rows, 1))
    assert sorted(first) != sorted(order(rows, 0, seed=1))
    sampler = BatchSampler(load(mixed, tokenizer)[0], 8, 4, True, 0)
    sampler.rows_of_step(40)
    assert [row for step in range(sampler.steps_per_epoch) for row in sampler.rows_of_step(step)] == first


def test_sources_without_weights_have_the_order_of_one_list(
    tmp_path: Path, recipe: WriteRecipe, tokenizer: Any
) -> None:
    paths = [str(write_uneven_rows(tmp_path / f"{name}.jsonl", 15)) for name in "ab"]
    plain, _ = load(recipe(data={"train": paths, "eval": None}), tokenizer)
    named, _ = load(recipe(data={"train": [{"path": path} for path in paths], "eval": None}), tokenizer)

    assert (len(plain.parts), len(named.parts)) == (1, 2)
    assert [part.name for part in named.parts] == ["a.jsonl", "b.jsonl"]
    assert order(plain, 1) == order(named, 1)
    assert [plain.location(row) for row in range(30)] == [named.location(row) for row in range(30)]
    assert texts(plain, tokenizer) == texts(named, tokenizer)
    assert plain.lengths.tolist() == named.lengths.tolist()


def test_a_limit_is_the_first_rows_and_stops_reading_there(tmp_path: Path, recipe: WriteRecipe, tokenizer: Any) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [*[chat(f"say {i}", "so") for i in range(5)], {"no": "row"}])
    source = {"path": str(path), "limit": 5}
    train, _ = load(recipe(data={"train": source, "eval": None}), tokenizer)
    assert [train.location(row) for row in range(len(train))] == [f"{path}:{line}" for line in range(1, 6)]
    assert len(load(recipe(data={"train": {**source, "limit": 3}, "eval": None}), tokenizer)[0]) == 3


def test_held_out_rows_are_those_of_eval_and_the_shares_of_sources(
    mixed: Path, tmp_path: Path, recipe: WriteRecipe, tokenizer: Any
) -> None:
    sources = [{"path": str(tmp_path / "a.jsonl"), "eval": 0.3, "weight": 2}, str(tmp_path / "b.jsonl")]
    _, held = load(recipe(data={"train": sources, "eval": str(tmp_path / "c.jsonl")}), tokenizer)
    assert held is not None
    assert [(part.name, part.passes) for part in held.parts] == [("c.jsonl", 1), ("a.jsonl", 1)]
    assert held.rows_per_epoch == len(held)


def test_weights_of_rows_beside_rows_without_stay_with_their_rows(
    tmp_path: Path, recipe: WriteRecipe, tokenizer: Any
) -> None:
    one = write_rows(tmp_path / "one.jsonl", [chat("a", "b")] * 2)
    two = write_rows(tmp_path / "two.jsonl", [chat("a", "b") | {"weight": 3}])
    train, _ = load(recipe(data={"train": [{"path": str(one)}, str(two)], "eval": None}), tokenizer)
    assert train.weights.tolist() == [1, 1, 3]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"train": [{"path": "a", "eval": 0}], "eval": 0.5}, "eval: 0.5: every source of `train` has `eval: 0`"),
        ({"train": [{"path": "a"}, "a"]}, "two sources have the name 'a': give each its own `name`"),
        ({"train": [{"path": "a"}, "a"], "eval": 0.5}, "two sources have the name 'a': give each its own `name`"),
        ({"train": "a", "eval": [{"path": "b", "weight": 2}]}, "`weight` and `eval` are keys of sources of `train`"),
        ({"train": [{"path": "a", "weigth": 2}]}, "data.train.0.weigth: unknown key. Nearest: 'weight'"),
        ({"train": [{"path": "a"}, 3]}, "data.train.1: Input should be a valid string, got 3"),
        ({"train": []}, "data.train: the list is empty"),
        ({"train": {"path": []}}, "data.train.path: the list is empty"),
        ({"train": [["a.jsonl"]]}, "data.train.0: a name, or a mapping with `path`, stands in a list"),
        (
            {"train": "a", "on_long_rows": "fill", "on_shared_rows": "drop"},
            "on_shared_rows: drop compares rows, and `on_long_rows: fill` joins",
        ),
        ({"train": "a", "eval": 1.5}, "data.eval: Input should be less than 1, got 1.5"),
    ],
)
def test_sources_that_cannot_be_are_refused_with_the_recipe(recipe: WriteRecipe, data: Any, expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe(data=data))
    assert str(caught.value).count(expected) == 1
    assert len(str(caught.value).splitlines()) == 1


def test_files_that_a_folder_has_beside_rows_are_listed(tmp_path: Path, recipe: WriteRecipe) -> None:
    (tmp_path / "set").mkdir()
    write_rows(tmp_path / "set" / "rows.jsonl", [])
    (tmp_path / "set" / "README.md").write_text("about")
    path = recipe(data={"train": [{"path": str(tmp_path / "set")}], "eval": 0.1})
    assert files_left_out(load_recipe(path)) == [str(tmp_path / "set" / "README.md")]


# --- texts that are too long -----------------------------------------------------------------------------------------


def test_texts_fill_rows_end_to_end_and_each_token_but_the_first_is_predicted_once(
    tmp_path: Path, tokenizer: Any
) -> None:
    texts = [{"text": f"say {i} " * (1 + i % 5)} for i in range(300)]  # more than a chunk
    others = [{"prompt": "a ", "completion": "b"}, {"text": "left out", "weight": 0}]
    rows = write_rows(tmp_path / "rows.jsonl", [*texts[:200], *others, *texts[200:]])

    filled = tokenize_rows(str(rows), "train", tokenizer, RowSettings(16, "fill", "stop", "answer"))
    assert filled.counts.joined == 300
    assert filled.counts.zero_weight == 1
    assert np.count_nonzero(filled.lengths != 16) <= 3  # the ends of two chunks, and the prompt
    joined = [row for row in range(len(filled)) if filled.label_mask(row)[1:].all()]
    assert len(joined) == len(filled) - 1
    ids = [[*tokenizer(one["text"])["input_ids"], tokenizer.eos_token_id] for one in texts]
    first, second = (list(itertools.chain.from_iterable(part)) for part in (ids[:254], ids[254:]))  # 254 of 256 lines
    predicted = np.concatenate([filled.ids(row)[1:] for row in joined])
    assert predicted.tolist() == [*first[1:], *second[1:]]
    starts = [0, *itertools.accumulate(map(len, ids))]
    for row in (0, 7, 20):  # each begins 15 tokens after the one before
        assert filled.location(joined[row]) == f"{rows}:{bisect_right(starts, 15 * row)}"


def test_a_long_row_that_is_no_text_stops_filling(tmp_path: Path, tokenizer: Any) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "a b"}, {"prompt": "a ", "completion": "b " * 40}])
    with pytest.raises(DataError, match="1 of 2 rows that are no text alone are longer than data.max_tokens 16"):
        tokenize_rows(str(rows), "train", tokenizer, RowSettings(16, "fill", "stop", "answer"))


# --- rows on both sides ----------------------------------------------------------------------------------------------


def test_training_rows_that_are_held_out_too_are_left_out_or_stop_the_run(
    tmp_path: Path, recipe: WriteRecipe, tokenizer: Any
) -> None:
    one = write_rows(tmp_path / "one.jsonl", [chat(f"say {i}", "so") | {"weight": 1 + i % 2} for i in range(20)])
    two = write_rows(tmp_path / "two.jsonl", [chat(f"tell {i}", "no") for i in range(5)])
    held = write_rows(tmp_path / "held.jsonl", [chat(f"say {i}", "so") for i in range(3, 10)])

    def sides(choice: str, eval_rows: Path = held) -> tuple[TokenDataset, TokenDataset | None]:
        sources = [{"path": str(one), "weight": 2}, str(two)]
        path = recipe(data={"train": sources, "eval": str(eval_rows), "on_shared_rows": choice})
        return load(path, tokenizer)

    every, eval_set = sides("count")
    others, _ = sides("drop")
    assert (len(every), len(others), others.counts.shared) == (25, 18, 7)
    assert set(texts(others, tokenizer)) == set(texts(every, tokenizer)) - set(texts(eval_set, tokenizer))
    assert others.counts.tokens == sum(others.lengths)
    labels = sum(int(others.label_mask(row)[1:].sum()) for row in range(len(others)))
    assert others.counts.label_tokens == labels
    assert others.rows_per_epoch == 2 * 13 + 5
    assert others.location(3).endswith("one.jsonl:11")
    assert others.weights.tolist() == [1, 2, 1, *([1, 2] * 5), *([1] * 5)]
    assert others.digest != every.digest
    with pytest.raises(DataError, match="7 of 7 held-out rows are training rows too"):
        sides("stop")
    with pytest.raises(DataError, match=r"every row of .*two\.jsonl is a held-out row too"):
        sides("drop", two)


# --- texts in parts --------------------------------------------------------------------------------------------------


def test_a_long_text_becomes_rows_that_predict_each_of_its_tokens_once(tmp_path: Path, tokenizer: Any) -> None:
    long, short = "one two three four five six seven " * 9, "a short one"
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": long}, {"text": short}])

    def tokenized(max_tokens: int, choice: str) -> TokenDataset:
        return tokenize_rows(str(rows), "train", tokenizer, RowSettings(max_tokens, choice, "stop", "answer"))

    full, parts = tokenized(512, "stop"), tokenized(16, "split")
    labels = [np.flatnonzero(parts.label_mask(row)[1:]) + 1 for row in range(len(parts))]
    predicted = [token for row in range(len(parts)) for token in parts.ids(row)[labels[row]].tolist()]

    expected = [token for row in range(2) for token in full.ids(row)[1:][full.label_mask(row)[1:]].tolist()]
    assert predicted == expected
    assert parts.lengths.max() == 16
    assert {parts.location(row) for row in range(len(parts) - 1)} == {f"{rows}:1"}
    assert (parts.counts.split, parts.counts.truncated) == (1, 0)
    assert parts.counts.rows == parts.counts.plain == len(parts)
    with pytest.raises(DataError, match="or for text split"):
        tokenized(16, "stop")


def test_a_long_row_that_is_no_text_alone_is_not_split(tmp_path: Path, tokenizer: Any) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "one two " * 30}, {"prompt": "a", "completion": "so " * 60}])
    with pytest.raises(DataError, match=r"1 of \d+ rows that are no text alone are longer than data\.max_tokens 20"):
        tokenize_rows(str(rows), "train", tokenizer, RowSettings(20, "split", "stop", "answer"))


# --- shared rows -----------------------------------------------------------------------------------------------------


def test_held_out_rows_that_are_training_rows_are_counted(tmp_path: Path, recipe: WriteRecipe, tokenizer: Any) -> None:
    train = write_rows(tmp_path / "train.jsonl", [chat(f"say {i}", "so") for i in range(30)])
    other = write_rows(tmp_path / "held.jsonl", [chat(f"say {i % 40}", "so") for i in [*range(25, 45), 44]])
    rows, eval_rows = load(recipe(data={"train": str(train), "eval": str(other)}), tokenizer)
    assert eval_rows is not None
    assert count_shared(rows, eval_rows) == 11  # each copy counts
