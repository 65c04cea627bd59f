"""Rows as other programs write them: LLaMA-Factory's files of alpaca's and ShareGPT's forms, and mixtures of both."""

import json
from pathlib import Path
from typing import Any

import pytest

from lorakit.data.encode import Encoder
from lorakit.data.row_files import BadRow
from lorakit.data.row_formats import Chat, to_conversation
from lorakit.data.row_settings import RowSettings
from tests.helpers.chat_templates import tokenizer_for, trl_templates
from tests.helpers.rows import tokenize_rows, write_rows

WEATHER = {
    "name": "get_weather",
    "description": "Get the weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = {"name": "get_weather", "arguments": {"city": "Oslo"}}
OPENAI_CALL = {"type": "function", "function": CALL}
TOOLS = [{"type": "function", "function": WEATHER}]
SETTINGS = RowSettings(4096, "stop", "stop", "answer")
ASKED = {"role": "user", "content": "How warm is it in Oslo?"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [OPENAI_CALL]}
RESULT = {"role": "tool", "content": '{"degrees": 4}'}
ANSWERED = {"role": "assistant", "content": "It is 4 degrees."}


def turns(call: Any) -> list[dict[str, str]]:
    return [
        {"from": "human", "value": "How warm is it in Oslo?"},
        {"from": "function_call", "value": call if isinstance(call, str) else json.dumps(call)},
        {"from": "observation", "value": '{"degrees": 4}'},
        {"from": "gpt", "value": "It is 4 degrees."},
    ]


def write_demo_files(folder: Path) -> dict[str, int]:
    """Write files of the shape of LLaMA-Factory's demo files; return the rows of each."""
    alpaca = [{"instruction": f"Add {n}", "input": "1" * (n % 2), "output": f"{n}", "system": ""} for n in range(20)]
    identity = [{"instruction": f"hi {n}", "input": "", "output": "I am {{name}}, by {{author}}."} for n in range(9)]
    plain = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
    glaive = [{"conversations": plain, "tools": "[]"}, {"conversations": plain * 2, "tools": json.dumps([WEATHER])}]
    for call in (CALL, [CALL], [CALL, CALL], {**CALL, "arguments": '{"city": "Oslo"}'}, OPENAI_CALL):
        glaive.append({"conversations": turns(call), "tools": json.dumps([WEATHER])})
    sizes = {}
    for name, rows in {"alpaca": alpaca, "identity": identity, "glaive": glaive}.items():
        (folder / f"{name}.json").write_text(json.dumps(rows, indent=1))
        sizes[name] = len(rows)
    return sizes


@pytest.mark.parametrize("template", ["qwen3", "qwen2_5", "glm4moe"])
def test_no_row_of_llama_factorys_demo_files_is_lost(tmp_path: Path, template: str) -> None:
    tokenizer = tokenizer_for(trl_templates()[template])
    for name, size in write_demo_files(tmp_path).items():
        counts = tokenize_rows(str(tmp_path / f"{name}.json"), "train", tokenizer, SETTINGS).counts
        assert (counts.bad, counts.unread) == (0, {})
        assert counts.rows >= size  # a conversation may become several rows


@pytest.mark.parametrize("call", [CALL, [CALL], OPENAI_CALL], ids=["one", "list", "OpenAI's"])
def test_calls_of_llama_factory_are_tool_calls_of_openais_form(call: Any) -> None:
    row = {"conversations": turns(call), "tools": json.dumps([WEATHER]), "system": "Be kind."}
    openai = {"messages": [{"role": "system", "content": "Be kind."}, ASKED, CALLED, RESULT, ANSWERED], "tools": TOOLS}
    assert to_conversation(row) == to_conversation(openai)
    tokenizer = tokenizer_for(trl_templates()["qwen3"])
    assert Encoder(tokenizer, RowSettings())(row) == Encoder(tokenizer, RowSettings())(openai)


def test_thinking_before_a_call_is_the_text_of_its_message() -> None:
    parsed = to_conversation({"conversations": turns("<think>\nask\n</think>\n" + json.dumps(CALL))})
    assert isinstance(parsed, Chat)
    assert parsed.messages[1] == {**CALLED, "content": "<think>\nask\n</think>"}


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [ASKED, ANSWERED]},
        {"messages": [{"from": "human", "value": ASKED["content"]}, {"from": "gpt", "value": ANSWERED["content"]}]},
        {"messages": [{"role": "human", "content": ASKED["content"]}, {"from": "model", "content": ANSWERED["content"]}]},
        {"messages": [{"role": None, "from": "user", "value": ASKED["content"]}, ANSWERED]},
        {"conversations": json.dumps([ASKED, ANSWERED])},
        {"prompt": [{"from": "human", "value": ASKED["content"]}], "completion": [ANSWERED]},
    ],
    ids=str,
)  # fmt: skip
def test_turns_of_either_form_are_read_under_either_key(row: dict[str, Any]) -> None:
    assert to_conversation(row) == to_conversation({"messages": [ASKED, ANSWERED]})


def test_keys_of_both_forms_in_one_message_are_refused_by_name() -> None:
    tokenizer = tokenizer_for(trl_templates()["qwen3"])
    row = {"messages": [ASKED, {**ANSWERED, "value": "another"}]}
    with pytest.raises(ValueError, match="message 2: the chat template leaves out value"):
        Encoder(tokenizer, RowSettings())(row)


def test_messages_in_a_cell_of_a_table_are_read_as_json(tmp_path: Path) -> None:
    tokenizer = tokenizer_for(trl_templates()["qwen3"])
    cell = json.dumps([ASKED, ANSWERED]).replace('"', '""')
    (tmp_path / "rows.csv").write_text(f'messages\n"{cell}"\n')
    write_rows(tmp_path / "rows.jsonl", [{"messages": [ASKED, ANSWERED]}])
    table, lines = (
        tokenize_rows(str(tmp_path / name), "train", tokenizer, SETTINGS) for name in ("rows.csv", "rows.jsonl")
    )
    assert table.ids(0).tolist() == lines.ids(0).tolist()


def part(kind: str, value: str) -> dict[str, str]:
    return {"type": kind, "value": value}


def test_llama_factorys_messages_of_parts_are_messages_of_openais_form() -> None:
    row = {
        "messages": [
            {"role": "user", "content": [part("text", ASKED["content"])], "loss_weight": 0.0},
            {"role": "assistant", "content": [part("reasoning", "I ask."), part("tool_call", json.dumps(CALL))], "loss_weight": 0.0},
            {"role": "tool", "content": [part("text", '{"degrees"'), {"type": "text", "text": ": 4}", "value": None}]},
            {"role": "assistant", "content": [part("text", "It is "), part("text", "4 degrees.")], "loss_weight": 1.0},
        ],
        "tools": json.dumps([WEATHER]),
    }  # fmt: skip
    called = {**CALLED, "reasoning_content": "I ask.", "weight": 0}
    assert to_conversation(row) == to_conversation({"messages": [ASKED, called, RESULT, ANSWERED], "tools": TOOLS})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "audio_file"}], r"message 1: content: audio: lorakit trains on text alone; leave such rows out"),
        ([{"type": "table"}], "message 1: content: a part has the type text, reasoning, tool_call"),
        (["text"], "a part has the type text"),
        ([{"type": "text"}], "a part has the type text"),
        ([{"type": "text", "text": 1}], "a part has the type text"),
        ([part("text", "a") | {"text": "b"}], "message 1: content: text"),
        ([part("text", "a") | {"loss_weight": 0}], r"message 1: content: loss_weight.*ignore_keys: \[loss_weight\]"),
        ([part("tool_call", "now")], "message 1: content: JSON of one call"),
        ([part("tool_call", json.dumps(CALL))], "message 1: has tool_calls beside its content"),
    ],
)
def test_a_part_that_is_not_read_is_refused_by_its_key(content: list[Any], message: str) -> None:
    calls = {"tool_calls": [OPENAI_CALL]} if "beside" in message else {}
    with pytest.raises(BadRow, match=message):
        to_conversation({"messages": [{"role": "assistant", "content": content, **calls}]})
