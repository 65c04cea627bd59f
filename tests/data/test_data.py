"""Rows become the right tokens with the right labels, or an error that names them."""

import contextlib
import copy
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lorakit.base.transformers_io import load_base
from lorakit.data.batch import IGNORE_INDEX
from lorakit.data.dataset import TokenDataset
from lorakit.data.encode import Encoder
from lorakit.data.find_rows import find_sources
from lorakit.data.row_files import BadRow, decode_line
from lorakit.data.row_formats import to_conversation
from lorakit.data.row_settings import RowSettings
from lorakit.data.sampler import BatchSampler, collate
from lorakit.errors import DataError
from lorakit.inference.prompts import PromptCodec
from lorakit.objectives.cross_entropy import LossModel, token_scores
from lorakit.patch.prompting import PromptForm
from tests.helpers.rows import chat, tokenize_rows, write_rows

SETTINGS = RowSettings(max_tokens=64, on_long_rows="truncate", on_bad_rows="stop", loss_on="answer")
CHATML = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '\n' + m.content + '<|end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
# drops the thinking of earlier turns
THINKING = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '\n' }}"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content }}{{ '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
OPENED = THINKING.replace(
    "assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif"
)  # and opens a thought in the prompt
ASKS_OTHERWISE = CHATML.replace("assistant\n' }}{% endif", "assistant: ' }}{% endif")
FORGETS = "{% for m in messages if m.role != 'system' %}" + CHATML.partition("%}")[2]
# ends its last turn with a token of its own, and marks where turns begin
HARMONY = (
    "{% for m in messages %}{{ '<|user|>' + m.role + '<|system|>' + m.content }}"
    "{{ '<|end|>' if not loop.last else '<|assistant|>' if m.role == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|user|>assistant<|system|>' }}{% endif %}"
)
HEADERS = (
    "{% for m in messages %}{{ ('<|user|>' if m.role == 'user' else '<|assistant|>' if m.role == 'assistant' else '<|system|>')"
    " + m.content }}{{ '<|end|>' if loop.last and m.role == 'assistant' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ ('Q: ' if m.role == 'user' else 'A: ') + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A: ' }}{% endif %}"
)


def with_template(tokenizer: Any, template: str | None) -> Any:
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


def label_text(tokenizer: Any, row: Any, loss_on: str = "answer") -> str:
    """Return the text of the labels of each row that a row becomes, joined by plus signs."""
    rows = Encoder(tokenizer, RowSettings(loss_on=loss_on))(row)
    labels = [[token for token, is_label in zip(one.ids, one.label_mask, strict=True) if is_label] for one in rows]
    return " + ".join(map(tokenizer.decode, labels))


TURNS = [
    {"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "and now"}, {"role": "assistant", "content": "no"},
]  # fmt: skip


def test_the_label_mask_is_every_answer_with_its_end_token_and_nothing_else(tokenizer: Any) -> None:
    assert label_text(tokenizer, {"messages": TURNS}) == "yes<|end|>no<|end|>"
    assert label_text(with_template(tokenizer, CHATML), {"messages": TURNS}) == "yes<|end|>no<|end|>"


def thinking(turns: list[dict[str, str]]) -> list[dict[str, str]]:
    return [
        {**turn, "content": "a</think>" + turn["content"]} if turn["role"] == "assistant" else turn for turn in turns
    ]


@pytest.mark.parametrize(
    ("template", "turns", "expected"),
    [
        (THINKING, thinking(TURNS), "a</think>yes<|end|> + a</think>no<|end|>"),
        (HARMONY, TURNS, "yes<|assistant|> + no<|assistant|>"),
        (HEADERS, TURNS, "yes<|end|> + no<|end|>"),
        (NO_END, TURNS[1:], "yes<|end|> + no<|end|>"),
        (OPENED, thinking(TURNS), "a</think>yes<|end|> + a</think>no<|end|>"),
        (OPENED, TURNS, "\n</think>\n\nyes<|end|> + \n</think>\n\nno<|end|>"),
        (
            CHATML,
            [*TURNS[:4], {"role": "assistant", "content": " \n no <|x|> hi and now  "}],
            "yes<|end|> \n no <|x|> hi and now  <|end|>",
        ),
        (CHATML, TURNS[2:], "yes<|end|>no<|end|>"),
    ],
    ids=[
        "rewrites earlier turns",
        "another last end",
        "no end but the last",
        "no end",
        "opens a thought",
        "opens a thought of answers without",
        "spaces",
        "assistant first",
    ],
)
def test_the_labels_are_exact_for_templates_of_every_habit(
    tokenizer: Any, template: str, turns: Any, expected: str
) -> None:
    assert label_text(with_template(tokenizer, template), {"messages": turns}) == expected


@pytest.mark.parametrize(
    ("template", "row", "expected"),
    [
        (ASKS_OTHERWISE, {"messages": TURNS}, "in use, the answer is generated after"),
        (FORGETS, {"messages": TURNS}, "message 1 (system): the chat template leaves it out"),
        (CHATML, {"messages": TURNS, "tools": [{"name": "clock"}]}, "tools: the chat template leaves them out"),
        (
            CHATML,
            {
                "messages": [
                    TURNS[1],
                    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "clock"}}]},
                ]
            },
            "message 2: the chat template leaves out its tool call",
        ),
    ],
    ids=["asks otherwise", "drops the system", "drops tools", "drops tool calls"],
)
def test_what_a_template_hides_or_asks_otherwise_is_not_taught(
    tokenizer: Any, template: str, row: Any, expected: str
) -> None:
    with pytest.raises(BadRow) as caught:
        Encoder(with_template(tokenizer, template), RowSettings())(row)
    assert expected in str(caught.value)


def test_an_end_token_that_takes_the_line_break_with_it_is_still_a_label(tokenizer: Any) -> None:
    wide = with_template(tokenizer, CHATML)
    wide.add_special_tokens({"additional_special_tokens": [AddedToken("<|done|>", special=True, rstrip=True)]})
    wide.chat_template = CHATML.replace("<|end|>", "<|done|>")

    assert label_text(wide, {"messages": TURNS}).replace("\n", "") == "yes<|done|>no<|done|>"


def test_a_header_token_that_takes_the_spaces_after_it_belongs_to_the_prompt(tokenizer: Any) -> None:
    wide = with_template(tokenizer, CHATML)
    wide.add_special_tokens({"additional_special_tokens": [AddedToken("<|sep|>", special=True, rstrip=True)]})
    wide.chat_template = CHATML.replace("'\n' + m.content", "'<|sep|>' + m.content").replace(
        "assistant\n", "assistant<|sep|>"
    )

    assert label_text(wide, chat("hi", "  yes")) == "yes<|end|>"


@pytest.mark.parametrize("scheme", ["always", "first"])
def test_a_tokenizer_that_adds_spaces_adds_none_inside_a_row(scheme: str) -> None:
    words = {word: i for i, word in enumerate(["<unk>", "</s>", *"▁yesnoAQ:h\n", "▁yes", "yes", "▁no"])}
    core = Tokenizer(models.BPE(words, [("▁", "y")][:0], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    core.decoder = decoders.Metaspace(prepend_scheme=scheme)
    spaced = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")

    (encoded,) = Encoder(spaced, RowSettings())({"prompt": "A: ", "completion": "yes"})

    assert spaced.decode(encoded.ids) == "A: yes</s>"
    assert (
        spaced.decode([t for t, is_label in zip(encoded.ids, encoded.label_mask, strict=True) if is_label]).strip()
        == "yes</s>"
    )


def test_a_template_without_end_token_gets_the_tokenizers(tokenizer: Any) -> None:
    plain = with_template(tokenizer, NO_END)

    assert label_text(plain, chat("hi", "yes")) == "yes<|end|>"
    (encoded,) = Encoder(plain, RowSettings())(chat("hi", "yes"))
    assert encoded.label_mask[encoded.label_mask.index(True) :] == [True] * sum(
        encoded.label_mask
    )  # every token of the answer, up to the end token


def test_the_labels_are_the_tokens_that_the_model_must_generate_after_its_prompt(tokenizer: Any) -> None:
    prompt = tokenizer.apply_chat_template(TURNS[:4], tokenize=False, add_generation_prompt=True)
    (encoded,) = Encoder(tokenizer, RowSettings())({"messages": TURNS})
    start = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])

    assert encoded.ids[:start] == tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert all(encoded.label_mask[start:])
    assert not encoded.label_mask[start - 1]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "one two ", "completion": "three"}, "three<|end|>"),
        ({"text": "one two"}, "one two<|end|>"),
        ({"instruction": "add", "input": "1 2", "output": "3"}, "3<|end|>"),
        ({"instruction": "add", "output": "3", "input": ""}, "3<|end|>"),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}, "yes<|end|>"),
        ({"prompt": TURNS[:4], "completion": TURNS[4:]}, "no<|end|>"),
        ({"messages": [TURNS[1], {**TURNS[2], "weight": 0}, *TURNS[3:]]}, "no<|end|>"),
        ({"messages": [TURNS[1], {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}]}, "yes<|end|>"),
        ({"messages": TURNS[1:3], "tools": [{"name": "clock"}]}, "yes<|end|>"),
        ({"messages": TURNS[1:3], "tools": '[{"name": "clock"}]', "id": 7}, "yes<|end|>"),
    ],
    ids=str,
)
def test_the_usual_row_shapes_are_known_by_their_keys(tokenizer: Any, row: Any, expected: str) -> None:
    assert label_text(tokenizer, row).removeprefix(tokenizer.bos_token) == expected


def test_all_tokens_are_labels_on_request(tokenizer: Any) -> None:
    assert "hi" in label_text(tokenizer, chat("hi", "yes"), "all")
    assert "one" in label_text(tokenizer, {"prompt": "one ", "completion": "two"}, "all")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (3, "a row is a mapping, got int"),
        ({"q": 1}, "no row format has the keys q; the formats are"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role 'robot' is none of"),
        ({"messages": [TURNS[1], {"role": "assistant", "content": ""}]}, "message 2: the assistant says nothing"),
        ({"messages": [{"role": "user", "content": 3}]}, "content is int"),
        ({"messages": [TURNS[1]]}, "no assistant message"),
        ({"messages": [TURNS[1], {**TURNS[2], "weight": 0}]}, "weight of every assistant message is 0 or false"),
        ({"messages": [{**TURNS[2], "loss": False}, TURNS[1], {**TURNS[2], "train": False}]}, "train or loss of every"),
        ({"prompt": TURNS[:3], "completion": [TURNS[1]]}, "no assistant message"),
        ({"messages": [TURNS[1], {"role": "assistant", "content": "a <|end|> b"}]}, "holds the end token '<|end|>'"),
        ({"messages": [TURNS[1], {"role": "tool", "content": "x"}, TURNS[2]]}, "the chat template refuses it"),
        ({"prompt": "a", "completion": ""}, "completion is empty"),
        ({"prompt": 1, "completion": "a"}, "prompt: text expected, got int"),
        ({"conversations": [{"from": "nobody", "value": "hi"}]}, "message 1: role 'nobody' is none of system"),
        ({"messages": TURNS, "tools": "{"}, "tools: not a JSON list"),
        ({"messages": [TURNS[1], {**TURNS[2], "weight": 0.5}]}, "weight: 0 or 1 expected"),
        ({"conversations": [{"from": ["x"], "value": "hi"}]}, "message 1: role \"['x']\" is none of"),
        ({"messages": [{"user": "hi"}]}, "message 1: has the keys user; a message has role and content, or from and value"),
        ({"messages": [{"role": "user", "contnet": "hi"}]}, "role, contnet; a message has role and content, or from and value. Nearest: 'content'"),
        ({"messages": [TURNS[1], {"role": "assistant", "contant": "hi"}]}, "or from and value. Nearest: 'content'"),
        ({"messages": ["hi"]}, "message 1: a mapping with role and content expected, got 'hi'"),
        ({"messages": [TURNS[1], {"from": "function_call", "value": "now"}]}, "message 2: function_call: JSON of one call"),
        ({"conversations": [{"from": "function_call", "value": "[" * 100_000}]}, "nested too deeply"),
        ({"messages": "[" * 100_000}, "messages: not a JSON list: not JSON: nested too deeply"),
        ({"messages": [TURNS[1], {"from": "function_call", "value": '{"name": "clock"}'}]}, "a call has a name and arguments"),
        ({"instruction": "a", "output": "b", "history": [["q", "a"]]}, "history: not read"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_trained_on_is_refused_with_the_reason(tokenizer: Any, row: Any, expected: str) -> None:
    with pytest.raises(BadRow) as caught:
        Encoder(tokenizer, RowSettings())(row)
    assert expected in str(caught.value)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.binary(max_size=60) | st.text(max_size=40).map(str.encode))
def test_no_line_escapes_as_anything_but_a_row_or_a_bad_row(raw: bytes) -> None:
    row = decode_line(raw)
    if not isinstance(row, BadRow):
        with contextlib.suppress(BadRow):
            to_conversation(row)


def test_bad_rows_stop_with_their_reasons_file_and_line_of_the_first_and_the_total(
    tmp_path: Path, tokenizer: Any
) -> None:
    path = tmp_path / "bad.jsonl"
    good = json.dumps(chat("hi", "yes")).encode()
    lines = [
        good,
        b"\xff\xfe",
        b"not json",
        b"",
        b'{"messages": 1, "messages": 2}',
        b'{"text": NaN}',
        *[b"[]"] * 8,
        good,
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")

    with pytest.raises(DataError) as caught:
        tokenize_rows(str(path), "train", tokenizer, SETTINGS)

    message = str(caught.value)
    assert "13 of 15 rows cannot be used" in message
    assert f"{path}:2: not UTF-8: byte 0" in message
    assert f"{path}:3: not JSON: Expecting value at column 1" in message
    assert f"{path}:4: the line is empty" in message
    assert f"{path}:5: not JSON: key 'messages' appears twice" in message
    assert f"{path}:6: not JSON: NaN" in message
    first = ", ".join(f"{path}:{line}" for line in (7, 8, 9))
    assert f"\n  8 rows ({first}, ...): a row is a mapping, got list" in message

    skipped = tokenize_rows(str(path), "train", tokenizer, RowSettings(64, "truncate", "skip", "answer"))
    assert (skipped.counts.rows, skipped.counts.bad) == (2, len(lines) - 2)


def test_bad_rows_are_counted_among_those_of_the_file_and_grouped_by_reason(tmp_path: Path, tokenizer: Any) -> None:
    several = with_template(tokenizer, THINKING)
    row = {"messages": thinking(TURNS)}
    path = write_rows(tmp_path / "rows.jsonl", [row, row, {"txt": 1}, row, {"txt": 2}])
    with pytest.raises(DataError, match=r"2 of 5 rows cannot be used:(?s:.*)\nFix them, or set data.on_bad_rows: skip"):
        tokenize_rows(str(path), "train", several, SETTINGS)
    others = {"messages": [*row["messages"][:1], {"role": "user", "content": "another"}, *row["messages"][2:]]}
    write_rows(path, [row, others])
    with pytest.raises(DataError) as caught:
        tokenize_rows(str(path), "train", several, replace(SETTINGS, turns="all"))
    first, bad, last = str(caught.value).splitlines()
    assert first == "data: 2 of 2 rows cannot be used:"
    assert bad.startswith(f"  2 rows ({path}:1, {path}:2): data.turns: all: the chat template shows an earlier answer")
    assert last == "Fix them"


def test_bad_rows_whose_reasons_differ_by_their_values_alone_are_one_line(tmp_path: Path, tokenizer: Any) -> None:
    def row(number: int) -> dict[str, Any]:
        turns = [{"role": "user", "content": "hi"}] * number
        call = {"function": {"name": f"look{number}", "arguments": f"[{number}]"}}
        return {"messages": [*turns, {"role": "assistant", "tool_calls": [call]}]}

    path = write_rows(tmp_path / "rows.jsonl", [row(1), {"weight": "a", **row(1)}, row(2), {"weight": -1, **row(1)}])
    with pytest.raises(DataError) as caught:
        tokenize_rows(str(path), "train", tokenizer, SETTINGS)
    assert str(caught.value).splitlines()[1:3] == [
        f"  2 rows ({path}:1, {path}:3), the first: message 2: the arguments of tool call 'look1' are no JSON object, got '[1]'",
        f"  2 rows ({path}:2, {path}:4), the first: weight: a number from 0 to 1e+30 expected, got 'a'",
    ]


def test_bad_rows_beyond_the_tenth_reason_are_counted(tmp_path: Path, tokenizer: Any) -> None:
    path = write_rows(tmp_path / "bad.jsonl", [{f"key {number}": 1} for number in [*range(12), 3, 11]])
    with pytest.raises(DataError, match="14 of 14 rows cannot be used") as caught:
        tokenize_rows(str(path), "train", tokenizer, SETTINGS)
    lines = str(caught.value).splitlines()
    assert lines[4].startswith(f"  2 rows ({path}:4, {path}:13): no row format has the keys key 3")
    assert lines[11:] == ["  ... and 3 more, for other reasons", lines[-1]]


@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_array_among_lines_is_said_to_be_one_with_the_suffix_that_reads_it(
    tmp_path: Path, tokenizer: Any, indent: int | None
) -> None:
    array = tmp_path / "array.jsonl"
    array.write_text(json.dumps([chat("hi", "yes")] * 3, indent=indent))
    with pytest.raises(DataError, match="a file that is one JSON array is read if its name ends in .json"):
        tokenize_rows(str(array), "train", tokenizer, SETTINGS)
    assert len(tokenize_rows(str(array.rename(tmp_path / "array.json")), "train", tokenizer, SETTINGS)) == 3


def test_a_file_in_utf_16_is_said_to_be_one(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(chat("hi", "yes")), encoding="utf-16")
    with pytest.raises(DataError, match="rows.jsonl: UTF-16, not UTF-8; convert it: iconv -f UTF-16 -t UTF-8"):
        tokenize_rows(str(path), "train", tokenizer, RowSettings(64, "truncate", "skip", "answer"))


def test_long_rows_are_cut_or_dropped_by_choice_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    long_answer, long_prompt = chat("hi", "so " * 60), chat("so " * 60, "yes")
    path = write_rows(tmp_path / "long.jsonl", [chat("hi", "yes"), long_answer, long_prompt])

    def prepared(choice: str) -> TokenDataset:
        return tokenize_rows(str(path), "train", tokenizer, RowSettings(20, choice, "stop", "answer"))

    cut = prepared("truncate").counts
    assert cut.rows == 2
    assert cut.changes() == ["1 truncated", "1 dropped: no label is left within max_tokens"]  # of the long prompt
    dropped = prepared("drop").counts
    assert (dropped.rows, dropped.truncated, dropped.dropped_long) == (1, 0, 2)
    with pytest.raises(DataError, match=r"2 of 3 rows are longer than data.max_tokens 20; the longest has \d+ tokens"):
        prepared("stop")


def test_files_of_every_kind_give_the_same_rows(tmp_path: Path, tokenizer: Any) -> None:
    rows = [chat(f"say {i}", f"so {i}") for i in range(5)]
    write_rows(tmp_path / "rows.jsonl", rows)
    with gzip.open(tmp_path / "rows.jsonl.gz", "wb") as file:
        file.write((tmp_path / "rows.jsonl").read_bytes())
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")

    each = [
        tokenize_rows(str(tmp_path / name), "train", tokenizer, SETTINGS)
        for name in ("rows.jsonl", "rows.jsonl.gz", "rows.parquet")
    ]
    all_files = tokenize_rows(str(tmp_path), "train", tokenizer, SETTINGS)

    assert [[r.ids(i).tolist() for i in range(len(r))] for r in each] == [
        [each[0].ids(i).tolist() for i in range(5)]
    ] * 3
    assert len(all_files) == 15
    assert all_files.location(14) == f"{tmp_path}/rows.parquet:5"


def test_missing_cut_and_foreign_files_are_named(tmp_path: Path, tokenizer: Any) -> None:
    compressed = gzip.compress(b'{"text": "a b"}\n' * 1000)
    (tmp_path / "cut.jsonl.gz").write_bytes(compressed[:-9])
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "rows.txt").write_text("a,b\n")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "nothing").mkdir()
    for name, message in {
        "absent.jsonl": f"looked for {tmp_path}/absent.jsonl", "cut.jsonl.gz": "cut or damaged after line",
        "cut.parquet": "cut or damaged", "rows.txt": "reads files ending in", "empty.jsonl": "no rows in it; write a row on each line",
        "nothing": "holds no file ending in",
        "x" * 3000: "no such file",
    }.items():  # fmt: skip
        with pytest.raises(DataError) as caught:
            tokenize_rows(str(tmp_path / name), "train", tokenizer, SETTINGS)
        assert message in str(caught.value), name


def test_every_missing_file_is_named_at_once_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(DataError) as caught:
        find_sources((str(tmp_path / "trian.jsonl"), str(tmp_path / "absent.jsonl")), "train")
    first, second = str(caught.value).splitlines()
    assert f"Nearest: '{tmp_path / 'train.jsonl'}'" in first
    assert "absent.jsonl: no such file" in second


def test_a_path_in_a_folder_that_exists_is_not_searched_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    with pytest.raises(DataError, match="mine is a folder here, so the hub was not searched"):
        find_sources("mine/train", "train")
    assert find_sources("yours/train", "train")[0].path is None


def test_rows_are_tokenised_once_and_again_when_anything_changes(
    rows: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    built = []
    encode = Encoder.__call__
    monkeypatch.setattr(Encoder, "__call__", lambda self, row: built.append(1) or encode(self, row))

    def count(tokenizer: Any, settings: RowSettings = SETTINGS) -> int:
        built.clear()
        tokenize_rows(str(rows), "train", tokenizer, settings)
        return len(built)

    assert (count(tokenizer), count(tokenizer)) == (40, 0)
    assert count(tokenizer, RowSettings(63, "truncate", "stop", "answer")) == 40
    assert count(with_template(tokenizer, CHATML)) == 40
    rows.write_text(rows.read_text() + json.dumps(chat("more", "so")) + "\n")
    assert count(tokenizer) == 41


def prepared_batches(rows: Path, tokenizer: Any, **settings: Any) -> BatchSampler:
    prepared = tokenize_rows(str(rows), "train", tokenizer, SETTINGS)
    return BatchSampler(prepared, **{"batch_size": 6, "micro_batch_size": 4, "packing": True, "seed": 0} | settings)


@pytest.mark.parametrize("packing", [True, False])
def test_every_epoch_holds_every_row_once_in_an_order_of_seed_and_epoch_alone(
    rows: Path, tokenizer: Any, packing: bool
) -> None:
    batches = prepared_batches(rows, tokenizer, packing=packing)
    same = prepared_batches(rows, tokenizer, packing=packing)
    other = prepared_batches(rows, tokenizer, packing=packing, seed=1)

    def order(source: BatchSampler, epoch: int) -> list[int]:
        steps = range(epoch * 7, epoch * 7 + 7)
        return [row for step in steps for batch in source.step(step) for row in batch.row_indices]

    first = order(batches, 0)
    assert sorted(first) == list(range(40))
    assert sorted(order(batches, 1)) == list(range(40))
    assert order(batches, 1) != first
    assert order(other, 0) != first
    torch.manual_seed(99)  # the global generators play no part
    assert order(same, 0) == first  # also when epoch 1 was not asked for before


def test_without_packing_rows_of_similar_length_go_together(rows: Path, tokenizer: Any) -> None:
    def padding(batches: list[Any]) -> float:
        return sum(b.input_ids.numel() - b.num_tokens for b in batches) / sum(b.input_ids.numel() for b in batches)

    batches = prepared_batches(rows, tokenizer, packing=False)
    by_length = batches.micro_batches(list(range(40)))
    unsorted = [collate(batches.rows, list(range(i, i + 4)), packing=False) for i in range(0, 40, 4)]

    assert padding(by_length) < 0.5 * padding(unsorted)
    assert padding([b for s in range(7) for b in prepared_batches(rows, tokenizer).step(s)]) == 0


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_rows_of_a_step_are_the_same_packed_and_padded(rows: Path, tokenizer: Any, num_ranks: int) -> None:
    def rows_of_steps(packing: bool) -> list[list[int]]:
        ranks = [
            prepared_batches(rows, tokenizer, packing=packing, rank=rank, num_ranks=num_ranks)
            for rank in range(num_ranks)
        ]
        return [
            sorted(row for rank in ranks for batch in rank.step(step) for row in batch.row_indices)
            for step in range(14)
        ]

    assert rows_of_steps(packing=True) == rows_of_steps(packing=False)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_rows_of_a_group_stay_together_in_their_order(
    rows: Path, tokenizer: Any, packing: bool, num_ranks: int
) -> None:
    ranks = [
        prepared_batches(rows, tokenizer, packing=packing, group_size=2, rank=rank, num_ranks=num_ranks)
        for rank in range(num_ranks)
    ]
    steps = [batch.row_indices for step in range(7) for rank in ranks for batch in rank.step(step)]
    held_out = [batch.row_indices for rank in ranks for batch in rank.eval_micro_batches()]

    for batches in (steps, held_out):
        pairs = [batch[i : i + 2] for batch in batches for i in range(0, len(batch), 2)]
        assert sorted(pairs) == [(i, i + 1) for i in range(0, 40, 2)]
        assert max(map(len, batches)) <= 4


def test_groups_that_are_not_complete_are_refused(rows: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match="train.micro_batch_size: .* rows in groups of 3, got 4"):
        prepared_batches(rows, tokenizer, group_size=3)
    with pytest.raises(DataError, match="in groups of 16, so each source has a multiple of as many"):
        prepared_batches(rows, tokenizer, group_size=16, batch_size=16, micro_batch_size=16)
    dropped = tokenize_rows(str(rows), "train", tokenizer, SETTINGS)
    dropped.counts.bad = 2
    with pytest.raises(DataError, match="none left out, cut, joined or held out"):
        BatchSampler(dropped, 6, 4, True, 0, group_size=2)


def test_labels_are_the_next_tokens_and_never_cross_into_another_row(rows: Path, tokenizer: Any) -> None:
    batches = prepared_batches(rows, tokenizer)
    for row in (0, 7):
        ids, label_mask = batches.rows.ids(row), batches.rows.label_mask(row)
        batch = collate(batches.rows, [row], packing=True)
        expected = [int(ids[t + 1]) if label_mask[t + 1] else IGNORE_INDEX for t in range(len(ids) - 1)] + [
            IGNORE_INDEX
        ]
        assert batch.labels[0].tolist() == expected
    every = BatchSampler(tokenize_rows(str(rows), "train", tokenizer, replace(SETTINGS, loss_on="all")), 6, 4, True, 0)
    ids = every.rows.ids(0).tolist()
    assert collate(every.rows, [0], packing=True).labels[0].tolist() == [*ids[1:], IGNORE_INDEX]
    pair = collate(batches.rows, [0, 7], packing=True)
    assert pair.labels[0, len(batches.rows.ids(0)) - 1] == IGNORE_INDEX
    assert (pair.position_ids[0] == 0).sum() == 2


def test_a_packed_rows_loss_and_gradients_are_those_of_the_row_alone(base: Path, rows: Path, tokenizer: Any) -> None:
    from lorakit.lora import adapter_tensors, inject

    model = inject(load_base(base, torch.float32, torch.device("cpu")), rank=4)
    for tensor in adapter_tensors(model).values():
        tensor.data.normal_(std=0.1)
    batches = prepared_batches(rows, tokenizer)
    chosen = [3, 17, 5, 30]

    def run(groups: list[list[int]], packing: bool) -> tuple[float, dict[str, torch.Tensor]]:
        model.zero_grad()
        losses = [
            token_scores(LossModel(model), collate(batches.rows, group, packing=packing)).losses.sum()
            for group in groups
        ]
        sum(losses).backward()
        return sum(float(loss.detach()) for loss in losses), {
            name: tensor.grad.clone() for name, tensor in adapter_tensors(model).items()
        }

    alone_loss, alone = run([[row] for row in chosen], packing=False)
    for groups, packing in (([chosen], True), ([chosen], False), ([chosen[:3], chosen[3:]], True)):
        loss, gradients = run(groups, packing)
        assert loss == pytest.approx(alone_loss, rel=1e-6)
        for name, gradient in gradients.items():
            assert (gradient - alone[name]).norm() <= 1e-5 * alone[name].norm(), name


@pytest.mark.parametrize("row", [{"text": "{}say 1 so"}, {"prompt": "{}say 1 ", "completion": "so"}])
def test_a_row_that_begins_with_the_begin_token_has_it_once(base: Path, row: dict[str, str], tokenizer: Any) -> None:
    """As of a text that a notebook made with apply_chat_template."""
    begin = tokenizer.bos_token
    with_begin, without = ({key: text.format(start) for key, text in row.items()} for start in (begin, ""))
    begins = copy.deepcopy(tokenizer)
    begins.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.bos_token_id)]
    )

    (encoded,) = Encoder(begins, RowSettings())(with_begin)

    (expected,) = Encoder(begins, RowSettings())(without)
    assert encoded.ids == expected.ids
    assert encoded.ids.count(tokenizer.bos_token_id) == 1
    assert encoded.label_mask[1:] == expected.label_mask[1:]  # no token predicts the first one
    codec = PromptCodec(load_base(base, torch.float32, torch.device("cpu")), begins)
    asked = [codec.token_ids(text, PromptForm(raw=True)) for text in (begin + "say 1", "say 1")]
    assert asked[0] == asked[1]


@pytest.mark.parametrize("prompt", ["<|user|>hi<|end|>Answer: ", "Cafe\u0301? Answer: "])
def test_prompts_with_special_tokens_and_accents_are_told_from_their_answers(tokenizer: Any, prompt: str) -> None:
    """Where a token would reach across the start of the answer, and the tokenizer writes accents in one letter."""
    composed = copy.deepcopy(tokenizer)
    composed.backend_tokenizer.normalizer = normalizers.NFC()

    (encoded,) = Encoder(composed, RowSettings())({"prompt": prompt, "completion": "yes it is"})

    labels = [token for token, is_label in zip(encoded.ids, encoded.label_mask, strict=True) if is_label]
    assert composed.decode(labels) == "yes it is<|end|>"
