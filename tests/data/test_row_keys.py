"""Every key of a row, a turn and a message is read, harmless or refused: none changes what is learnt unseen."""

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorakit.base.find import find_base
from lorakit.base.transformers_io import load_tokenizer
from lorakit.cli import main
from lorakit.data.encode import Encoder
from lorakit.data.row_files import BadRow
from lorakit.data.row_formats import HARMLESS, REMEDIES, UNTHINKING, Encoded, to_conversation
from lorakit.data.token_cache import RowSettings
from tests.helpers.chat_templates import tokenizer_for, trl_templates
from tests.helpers.rows import chat, tokenize_rows, write_rows

ASKED = {"role": "user", "content": "hi"}
ANSWERED = {"role": "assistant", "content": "yes"}
TURNS = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
PLAIN = {"prompt": "hi", "completion": "yes"}
CHAT = {"messages": [ASKED, ANSWERED]}
SHOWS_REASONING = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}{{ m.reasoning_content }} so {% endif %}"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(find_base("builtin:tiny"))


def labels(tokenizer: Any, row: Any, *ignore: str) -> str:
    (encoded,) = Encoder(tokenizer, RowSettings(ignore_keys=tuple(ignore)))(row)
    return str(tokenizer.decode([i for i, mask in zip(encoded.ids, encoded.label_mask, strict=True) if mask]))


@pytest.mark.parametrize(
    ("row", "names"),
    [
        (PLAIN | {"label": False}, "label: whether the answer is good"),
        (CHAT | {"label": False}, "label: whether the answer is good"),
        (CHAT | {"kto_tag": False}, "kto_tag: whether the answer is good"),
        (CHAT | {"chosen": [ANSWERED]}, "chosen: a preference pair"),
        ({"prompt": "hi", "chosen": "yes", "rejected": "no"}, "chosen: a preference pair"),
        (PLAIN | {"system": "Be kind."}, "system: plain text has no system prompt"),
        (PLAIN | {"history": [["a", "b"]]}, "history: not read"),
        ({"conversations": TURNS, "history": [["a", "b"]]}, "history: not read"),
        (CHAT | {"images": ["a.png"]}, "images: lorakit trains on text alone"),
        (CHAT | {"functions": [{"name": "clock"}]}, "functions: OpenAI's earlier form"),
        (CHAT | {"weight": -1}, "weight: a number from 0 to 1e+30 expected, got -1"),
        (PLAIN | {"weight": "2"}, "weight: a number from 0 to 1e+30 expected, got '2'"),
        (PLAIN | {"weight": True}, "weight: a number from 0 to 1e+30 expected, got True"),
        (CHAT | {"train": False}, "train: of a full row is not read; write weight: 0"),
        (CHAT | {"text": "hi yes"}, "text: not a key that is read here"),
        (PLAIN | {"tools": [{"name": "clock"}]}, "tools: plain text has no tools"),
        ({"instruction": "a", "output": "b", "tools": [1]}, "tools"),
        ({"messages": [ASKED, ANSWERED | {"reasoning_content": "hm"}]}, "message 2: the chat template leaves out reasoning_content"),
        ({"messages": [ASKED, ANSWERED | {"thinking": "hm"}]}, "message 2: the chat template leaves out thinking"),
        ({"messages": [ASKED, ANSWERED | {"function_call": {"name": "clock"}}]}, "leaves out function_call: OpenAI's"),
        ({"messages": [ASKED | {"images": ["a.png"]}, ANSWERED]}, "message 1: the chat template leaves out images"),
        ({"messages": [ASKED, ANSWERED | {"train": "no"}]}, "message 2: train: 0 or 1 expected, got 'no'"),
        ({"messages": [ASKED, ANSWERED | {"weight": 1, "loss": False}]}, "message 2: weight, loss disagree"),
        ({"conversations": [TURNS[0], TURNS[1] | {"score": 0.1}]}, "message 2: the chat template leaves out score"),
        ({"messages": [{"role": "system", "content": "a"}, ASKED, ANSWERED], "system": "b"}, "system: another one"),
    ],
    ids=str,
)  # fmt: skip
def test_a_key_that_says_what_to_learn_and_is_not_read_is_refused(tokenizer: Any, row: Any, names: str) -> None:
    with pytest.raises(BadRow) as caught:
        labels(tokenizer, row)
    assert names in str(caught.value)


@pytest.mark.parametrize("off", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"loss": False}, {"loss": 0}])
def test_a_message_that_is_switched_off_is_not_learnt(tokenizer: Any, off: dict[str, Any]) -> None:
    later = [ASKED, {"role": "assistant", "content": "no"}]
    assert labels(tokenizer, {"messages": [ASKED, ANSWERED | off, *later]}) == "no<|end|>"
    turns = [TURNS[0], TURNS[1] | off, TURNS[0], {"from": "gpt", "value": "no"}]
    assert labels(tokenizer, {"conversations": turns}) == "no<|end|>"
    with pytest.raises(BadRow, match="nothing to learn"):
        labels(tokenizer, {"messages": [ASKED, ANSWERED | off]})


@pytest.mark.parametrize(
    "row", [CHAT, {"conversations": TURNS}, {"prompt": [ASKED], "completion": [ANSWERED]}], ids=str
)
def test_a_system_prompt_beside_a_conversation_is_its_first_message(tokenizer: Any, row: dict[str, Any]) -> None:
    parsed = to_conversation(row | {"system": "Be kind."})
    assert parsed.messages == ({"role": "system", "content": "Be kind."}, ASKED, ANSWERED)
    assert parsed.trained == (False, False, True)
    assert to_conversation({"messages": [{"role": "system", "content": "a"}, ASKED, ANSWERED], "system": "a"})


@pytest.mark.parametrize(
    "row",
    [
        CHAT | {"images": ["a.png"]},
        {"messages": [ASKED | {"images": ["a.png"]}, ANSWERED]},
        {"messages": [ASKED | {"content": [{"type": "image_url", "image_url": {"url": "a"}}]}, ANSWERED]},
        {
            "messages": [
                ASKED | {"content": [{"type": "image", "image": "a"}, {"type": "text", "text": "hi"}]},
                ANSWERED,
            ]
        },
        {"messages": [ASKED | {"content": [{"type": "input_audio"}]}, ANSWERED]},
        {"prompt": "what is this?", "completion": "a cat", "video": "a.mp4"},
    ],
    ids=str,
)
def test_what_a_text_may_be_about_is_never_offered_to_be_ignored(tokenizer: Any, row: dict[str, Any]) -> None:
    with pytest.raises(BadRow, match=r"leave such rows out \(data.on_bad_rows: skip does") as caught:
        labels(tokenizer, row)
    assert "ignore_keys" not in str(caught.value)


def test_harmless_keys_in_parts_of_a_content_are_counted(tokenizer: Any, tmp_path: Path) -> None:
    parts = [
        {"type": "text", "text": "hi", "id": 1, "cached": True},
        {"type": "text", "text": "!", "lang": "en", "date": ""},
    ]
    rows = [
        {"messages": [ASKED | {"content": parts}, ANSWERED]},
        {"conversations": [{"from": "human", "value": parts[:1]}, TURNS[1]]},
        CHAT,
    ]
    settings = RowSettings(64, "stop", "stop", "answer", ("cached",))
    tokens = tokenize_rows(str(write_rows(tmp_path / "rows.jsonl", rows)), "train", tokenizer, settings)
    assert tokens.counts.unread == {"id": 2, "cached": 2, "lang": 1}


def test_every_answer_is_checked_where_all_tokens_are_trained(tokenizer: Any) -> None:
    def encode(answer: dict[str, Any]) -> Encoded:
        row = {"messages": [ASKED, answer, ASKED, ANSWERED]}
        return Encoder(tokenizer, RowSettings(loss_on="all"))(row)[0]

    assert all(encode(ANSWERED).label_mask[1:])
    with pytest.raises(BadRow, match="message 2: the chat template leaves out mood"):
        encode(ANSWERED | {"mood": "glad"})
    with pytest.raises(BadRow, match="message 2: the chat template leaves out reasoning_content"):
        encode(ANSWERED | {"reasoning_content": "hm"})
    with pytest.raises(BadRow, match="message 2: the chat template leaves out its tool call"):
        encode(ANSWERED | {"tool_calls": [{"function": {"name": "yes", "arguments": {}}}]})
    assert encode(ANSWERED | {"id": 7}).unread == {"id"}


def calling(arguments: Any, **fields: Any) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": "weather", "arguments": arguments}}]
    return {"role": "assistant", "content": "", "tool_calls": calls, **fields}


@pytest.mark.parametrize("arguments", ["{city: Oslo}", "not json at all", "[1]", "null", ["Oslo"], 3], ids=str)
def test_arguments_of_a_call_that_are_no_object_are_refused(arguments: Any) -> None:
    with pytest.raises(BadRow) as caught:
        to_conversation({"messages": [ASKED, ANSWERED, calling(arguments)]})
    assert str(caught.value) == (
        f"message 3: the arguments of tool call 'weather' are no JSON object, got {str(arguments)!r}"
    )
    for good in ('{"city": "Oslo"}', {"city": "Oslo"}, "{}", "", None):
        assert to_conversation({"messages": [ASKED, calling(good)]})


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"content": "<think>A ans"}, "message 2: its thinking has no end: <think> without </think>"),
        ({"content": "<think>A</think>ans", "reasoning_content": "A"}, "message 2: has thinking in reasoning_content and in"),
        ({"content": "A</think>ans", "thinking": "A"}, "message 2: has thinking in thinking and in its content; keep one"),
    ],
    ids=str,
)  # fmt: skip
def test_broken_thinking_is_refused(answer: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        to_conversation({"messages": [ASKED, ANSWERED | answer]})
    for content in ("the tag <think> opens a thought", "A</think>ans", "<think>A</think>ans"):
        assert to_conversation({"messages": [ASKED, ANSWERED | {"content": content}]})


def test_what_is_unusual_in_a_conversation_is_counted_and_an_id_of_a_call_is_not(tmp_path: Path) -> None:
    tokenizer = tokenizer_for(trl_templates()["qwen2_5"])
    tool = {"name": "weather"}
    result = {"role": "tool", "content": "sun", "name": "weather", "tool_call_id": "a"}
    rows = [
        {"messages": [ASKED, calling("{}"), result, ANSWERED], "tools": [tool]},
        {"messages": [ASKED, calling("{}"), result, ANSWERED], "tools": [{"name": "clock"}]},
        {"messages": [ASKED, calling("{}"), result, ANSWERED]},
        {"messages": [{"role": "system", "content": "so"}, ANSWERED | {"content": "<think>A</think>yes"}]},
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    counts = tokenize_rows(str(path), "train", tokenizer, RowSettings(max_tokens=2048)).counts
    assert counts.notes == {
        UNTHINKING: 3,
        "a call of a tool that `tools` does not list": 1,
        "tool calls without `tools`": 1,
        "no message of the user": 1,
    }
    assert counts.unread == {"name": 3}


@pytest.mark.parametrize(
    ("row", "ending"),
    [
        ({"message": [ASKED, ANSWERED]}, "data.columns: {prompt: COLUMN, completion: COLUMN}. Nearest: 'messages'."),
        ({"question": "a", "answer": "b"}, "data.columns: {instruction: question, output: answer}."),
        ({"prompt": "a", "response": "b", "context": "c"}, "data.columns: {instruction: prompt, input: context, output: response}."),
        ({"instruction": "a", "input": "", "output": None}, "output is null"),
        ({"messages": None, "id": 1}, "messages is null"),
    ],
    ids=str,
)  # fmt: skip
def test_a_row_of_no_format_is_answered_with_what_it_lacks(row: dict[str, Any], ending: str) -> None:
    with pytest.raises(BadRow) as caught:
        to_conversation(row)
    assert str(caught.value).endswith(ending)


def test_harmless_keys_are_counted_and_empty_ones_are_nothing(tokenizer: Any, tmp_path: Path) -> None:
    rows = [
        chat("hi", "yes") | {"id": 1, "source": "here", "images": [], "system": "", "weight": 1.0},
        {"messages": [ASKED | {"name": "Ann"}, ANSWERED | {"refusal": None}], "id": 2},
    ]
    tokens = tokenize_rows(
        str(write_rows(tmp_path / "rows.jsonl", rows)), "train", tokenizer, RowSettings(64, "stop", "stop", "answer")
    )
    assert tokens.counts.unread == {"id": 2, "source": 1, "name": 1}
    assert not HARMLESS & REMEDIES.keys()


@pytest.mark.parametrize(
    ("row", "like"),
    [
        (PLAIN | {"messages": [], "weight": "", "system": "", "tools": {}, "label": ""}, PLAIN),
        (CHAT | {"prompt": "", "completion": "", "text": "", "input_ids": []}, CHAT),
        ({"conversations": [], "text": "so", "prompt": "", "completion": ""}, {"text": "so"}),
        ({"prompt": "", "completion": "so", "text": ""}, {"prompt": "", "completion": "so"}),
        ({"conversations": [TURNS[0] | {"tools": []}, TURNS[1] | {"tool_calls": [], "weight": None}]}, CHAT),
    ],
    ids=str,
)
def test_an_empty_value_means_what_a_missing_key_means(row: dict[str, Any], like: dict[str, Any]) -> None:
    assert to_conversation(row) == to_conversation(like)


def test_a_harmless_key_of_a_message_is_unread_where_the_template_leaves_it_out(tokenizer: Any) -> None:
    row = {"messages": [ASKED | {"name": "Ann"}, ANSWERED | {"id": 7}, ASKED, ANSWERED | {"name": "", "id": 8}]}
    shows = copy.deepcopy(tokenizer)
    assert Encoder(shows, RowSettings())(row)[0].unread == {"name", "id"}
    shows.chat_template = SHOWS_REASONING.replace("<|{{ m.role }}|>", "<|{{ m.role }}|>{{ m.name }}")
    assert Encoder(shows, RowSettings())(row)[0].unread == {"id"}
    row["messages"][1]["name"] = "Bob"
    shows.chat_template = SHOWS_REASONING.replace("{{ m.content }}", "{{ m.name if m.role == 'user' }}{{ m.content }}")
    assert Encoder(shows, RowSettings())(row)[0].unread == {"name", "id"}  # one of the names is lost


def test_keys_to_ignore_are_not_read_in_rows_turns_and_messages(tokenizer: Any) -> None:
    row = {"messages": [ASKED, ANSWERED | {"thinking": "hm"}], "prompt": "hi", "grade": True}
    assert labels(tokenizer, row, "thinking", "prompt", "grade") == "yes<|end|>"
    assert to_conversation(row, ["thinking", "prompt", "grade"]).unread == {"thinking", "prompt", "grade"}
    assert labels(tokenizer, {"conversations": [TURNS[0], TURNS[1] | {"score": 1}]}, "score") == "yes<|end|>"
    with pytest.raises(BadRow, match="no row format"):
        labels(tokenizer, CHAT, "messages")


def test_reasoning_that_the_template_shows_is_learnt(tokenizer: Any) -> None:
    shows = copy.deepcopy(tokenizer)
    shows.chat_template = SHOWS_REASONING
    answer = labels(shows, {"messages": [ASKED, ANSWERED | {"reasoning_content": "hm"}]})
    assert answer == "hm so yes<|end|>"


KEYS = st.sampled_from(
    [*sorted(REMEDIES), *sorted(HARMLESS)[:6], "messages", "prompt", "completion", "text", "nothing"]
)
VALUES = st.sampled_from([None, "", [], 0, 1, False, True, "words", [ASKED, ANSWERED], {"a": 1}])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_no_key_with_a_value_is_lost(extra: dict[str, Any]) -> None:
    """A row with more keys is refused, or is parsed as it is without those that are named as unread."""
    row = CHAT | {key: value for key, value in extra.items() if key != "messages"}
    try:
        parsed = to_conversation(row)
    except BadRow:
        return
    assert parsed.unread <= HARMLESS
    assert parsed == to_conversation(
        {k: v for k, v in row.items() if k not in parsed.unread} | dict.fromkeys(parsed.unread, "x")
    )


def test_check_names_the_key_and_counts_those_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [chat("hi", "yes") | {"grade": True, "id": n} for n in range(3)])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"base: {{model: builtin:tiny}}\ndata: {{train: {rows}}}\noutput: {tmp_path / 'out'}\n")
    assert main(["check", str(recipe)]) == 2
    assert f"3 rows ({rows}:1, {rows}:2, {rows}:3): grade: not a key that is read here" in capsys.readouterr().err
    assert main(["check", str(recipe), "data.ignore_keys=[grade]"]) == 0
    shown = capsys.readouterr().out
    assert "id: not read, in 3 rows" in shown
    assert "grade: not read, in 3 rows" in shown


def test_check_refuses_what_train_would_refuse_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "so " * 1500}, {"text": "so"}])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"base: {{model: builtin:tiny}}\ndata: {{train: {rows}, max_tokens: 4096}}\noutput: {tmp_path / 'out'}\n"
        "train: {log_to: [wandb]}\n"
    )
    assert main(["check", str(recipe)]) == 2
    said = capsys.readouterr().err
    assert "1 of 2 rows are longer than this base's 1024 positions" in said
    assert f"{rows.name}:1" in said
    assert "wandb not installed: pip install wandb" in said
    assert main(["train", str(recipe), "train.log_to=[]"]) == 2
    assert "longer than this base's 1024 positions" in capsys.readouterr().err
