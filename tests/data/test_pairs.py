"""Preference pairs: every format of a row that has them, and rows that are none."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lorakit.data.dataset import Part, TokenDataset, without_shared
from lorakit.data.row_settings import RowSettings
from lorakit.data.sampler import BatchSampler, _shared
from lorakit.errors import DataError
from tests.helpers.rows import chat, tokenize_rows, write_rows

USER = {"role": "user", "content": "what is 2 plus 3?"}
CHOSEN = {"role": "assistant", "content": "it is 5"}
REJECTED = {"role": "assistant", "content": "no idea"}
HUMAN = {"from": "human", "value": USER["content"]}
FORMATS: dict[str, dict[str, Any]] = {
    "explicit prompt": {"prompt": [USER], "chosen": [CHOSEN], "rejected": [REJECTED]},
    "implicit prompt": {"chosen": [USER, CHOSEN], "rejected": [USER, REJECTED]},
    "messages": {"messages": [USER], "chosen": CHOSEN, "rejected": REJECTED},
    "messages and text": {"messages": [USER], "chosen": "it is 5", "rejected": "no idea"},
    "a text as prompt": {"prompt": USER["content"], "chosen": [CHOSEN], "rejected": [REJECTED]},
    "full conversations": {"prompt": USER["content"], "chosen": [USER, CHOSEN], "rejected": [USER, REJECTED]},
    "the chosen one twice": {"messages": [USER, CHOSEN], "chosen": [USER, CHOSEN], "rejected": [USER, REJECTED]},
    "sharegpt": {
        "conversations": [HUMAN],
        "chosen": {"from": "gpt", "value": "it is 5"},
        "rejected": {"from": "gpt", "value": "no idea"},
    },
    "alpaca": {"instruction": USER["content"], "chosen": "it is 5", "rejected": "no idea"},
}
TEXTS: dict[str, dict[str, Any]] = {
    "explicit prompt": {"prompt": "Q: what is 2 plus 3? A:", "chosen": " it is 5", "rejected": " it was 6"},
    "implicit prompt": {"chosen": "Q: what is 2 plus 3? A: it is 5", "rejected": "Q: what is 2 plus 3? A: is it 6"},
}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "one answer": (chat("hi", "yes"), "rows with `chosen` and `rejected`"),
    "equal answers": ({"prompt": "hi", "chosen": " a", "rejected": " a"}, "chosen and rejected are the same answer"),
    "an empty answer": ({"prompt": "hi", "chosen": " a", "rejected": ""}, "rejected: missing or empty"),
    "no answer": ({"prompt": "hi", "rejected": " a"}, "chosen: missing or empty"),
    "a list of texts": ({"prompt": "hi", "chosen": " a", "rejected": [" b"]}, "rejected: a text or messages expected"),
    "text and messages": ({"chosen": "hi", "rejected": [USER, REJECTED]}, "both text or both lists of messages"),
    "an answer before": (
        {"messages": [USER, REJECTED], "chosen": [CHOSEN], "rejected": [REJECTED]},
        "messages: ends with an answer, beside chosen and rejected; data.ignore_keys: [messages]",
    ),
    "a number": ({"prompt": "hi", "chosen": 1, "rejected": 2}, "chosen: a text or messages expected, got 1"),
    "an unread key": ({"prompt": "hi", "chosen": " a", "rejected": " b", "margin": 2}, "margin"),
    "nothing in common": ({"chosen": [USER, CHOSEN], "rejected": [{**USER, "content": "?"}, REJECTED]}, "prompts"),
}


def tokenize(folder: Path, tokenizer: Any, rows: list[dict[str, Any]], **settings: Any) -> TokenDataset:
    file = write_rows(folder / "pairs.jsonl", rows)
    return tokenize_rows(str(file), "train", tokenizer, RowSettings(**{"max_tokens": 64, "pairs": True, **settings}))


def shown(rows: TokenDataset, tokenizer: Any) -> list[tuple[str, str]]:
    """Every row's prompt and label tokens, as text."""
    texts = []
    for row in range(len(rows)):
        ids, mask = rows.ids(row), rows.label_mask(row)
        texts.append((tokenizer.decode(ids[~mask]), tokenizer.decode(ids[mask])))
    return texts


@pytest.mark.parametrize("row", FORMATS.values(), ids=FORMATS)
def test_every_format_gives_the_tokens_of_two_conversations(
    tokenizer: Any, tmp_path: Path, row: dict[str, Any]
) -> None:
    rows = tokenize(tmp_path, tokenizer, [row])

    prompt = "<|start|><|user|>what is 2 plus 3?<|end|><|assistant|>"
    assert shown(rows, tokenizer) == [(prompt, "it is 5<|end|>"), (prompt, "no idea<|end|>")]
    assert rows.counts.pairs == 1
    assert rows.counts.file_rows == 1


@pytest.mark.parametrize("row", TEXTS.values(), ids=TEXTS)
def test_a_prompt_of_texts_ends_between_two_words(tokenizer: Any, tmp_path: Path, row: dict[str, Any]) -> None:
    (prompt, chosen), (same, rejected) = shown(tokenize(tmp_path, tokenizer, [row]), tokenizer)

    assert prompt == same
    assert prompt.endswith("what is 2 plus 3? A:")
    assert chosen.startswith(" it")
    assert rejected.startswith((" it", " is"))


@pytest.mark.parametrize(("row", "message"), BAD.values(), ids=BAD)
def test_a_row_that_is_no_pair_is_named_with_its_line(
    tokenizer: Any, tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    good = FORMATS["explicit prompt"]
    with pytest.raises(DataError, match=r"pairs\.jsonl:2: ") as raised:
        tokenize(tmp_path, tokenizer, [good, row])
    assert message in str(raised.value)

    skipped = tokenize(tmp_path, tokenizer, [good, row, good], on_bad_rows="skip")
    assert (skipped.counts.pairs, skipped.counts.bad, len(skipped)) == (2, 1, 4)


def test_rows_of_single_answers_name_the_objective_that_reads_pairs(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="objective: {name: dpo}"):
        tokenize(tmp_path, tokenizer, [FORMATS["explicit prompt"]], pairs=False)


@pytest.mark.parametrize("long", ["chosen", "rejected"])
@pytest.mark.parametrize("how", ["drop", "truncate"])
def test_an_answer_that_is_left_out_takes_the_other_one_with_it(
    tokenizer: Any, tmp_path: Path, long: str, how: str
) -> None:
    good = FORMATS["alpaca"]
    # of a long prompt truncation leaves no label
    row = {**good, long: "it is " * 80} if how == "drop" else {**good, "instruction": "what " * 80}
    rows = tokenize(tmp_path, tokenizer, [good, row, good], on_long_rows=how)

    assert [rows.location(row) for row in range(len(rows))] == [f"{tmp_path}/pairs.jsonl:{n}" for n in (1, 1, 3, 3)]
    assert rows.counts.pairs == 2


def numbered(number: int) -> dict[str, Any]:
    return {"prompt": f"say {number}", "chosen": f" yes {number}", "rejected": f" no {number}" + " no" * (number % 3)}


@pytest.mark.parametrize("passes", [1.0, 0.5, 1.75])
@pytest.mark.parametrize("packing", [True, False])
def test_no_epoch_step_or_micro_batch_parts_a_pair(
    tokenizer: Any, tmp_path: Path, passes: float, packing: bool
) -> None:
    (part,) = tokenize(tmp_path, tokenizer, [numbered(number) for number in range(11)]).parts
    rows = TokenDataset([Part(part.table, "weighted", passes)])
    batches = BatchSampler(rows, 6, 4, packing, 0)
    counted = np.zeros(len(rows), int)
    for step in range(4 * batches.steps_per_epoch):
        for batch in batches.step(step):
            first, second = batch.row_indices[::2], batch.row_indices[1::2]
            assert [row + 1 for row in first] == list(second)
            assert all(row % 2 == 0 for row in first)
            np.add.at(counted, list(batch.row_indices), 1)
    assert counted.sum() == 4 * rows.rows_per_epoch == 4 * 2 * round(passes * 11)
    assert counted.max() - counted.min() <= 1


def test_a_pair_is_held_out_on_one_side_and_a_shared_one_is_left_out(tokenizer: Any, tmp_path: Path) -> None:
    numbers = [numbered(number) for number in range(40)]
    sides = [tokenize(tmp_path, tokenizer, numbers, eval_share=0.3, eval_side=side) for side in (False, True)]
    locations = [{rows.location(row) for row in range(len(rows))} for rows in sides]
    assert all(len(rows) == 2 * len(names) > 0 for rows, names in zip(sides, locations, strict=True))
    assert not locations[0] & locations[1]
    assert sum(map(len, locations)) == 40

    everything = tokenize(tmp_path, tokenizer, numbers)
    left = without_shared(everything, sides[1])
    assert {left.location(row) for row in range(len(left))} == locations[0]
    assert left.counts.pairs == len(locations[0])


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        (("same", "same", "same"), [0, 20, 20]),
        (("same", "other", "same"), [0, 0, 0]),
        (("same", "other", "other"), [0, 0, 20]),
        (("same", "same", "other"), [0, 20, 0]),
    ],
)
def test_rows_share_what_they_have_in_common_with_the_last_row_that_shares_none(
    prompts: tuple[str, ...], expected: list[int]
) -> None:
    """Attention takes the keys of that row, and of no other."""
    start = {"same": torch.arange(21), "other": torch.arange(100, 121)}
    ids = [torch.cat([start[name], torch.tensor([7, 8 + number])]) for number, name in enumerate(prompts)]
    masks = [torch.arange(23) >= 21] * 3
    assert _shared(ids, masks, 3) == expected
    assert _shared(ids * 2, masks * 2, 3) == expected * 2


def test_few_tokens_of_a_long_row_are_not_shared() -> None:
    ids = [torch.cat([torch.arange(21), torch.arange(200 + number, 300 + number)]) for number in range(2)]
    assert _shared(ids, [torch.arange(121) >= 21] * 2, 2) == [0, 0]
