"""The law of labels, for every conversation and every chat template: what is trained is what is asked and answered."""

import json
from functools import cache
from typing import Any

import pytest

from lorakit.data.chat_template import render_template, template_variables
from lorakit.data.encode import Encoder
from lorakit.data.row_files import BadRow
from lorakit.data.row_formats import Chat, Encoded, to_conversation
from lorakit.data.row_settings import RowSettings
from lorakit.errors import DataError
from scripts.templates_page import PAGE, page
from tests.helpers.chat_templates import (
    conversations,
    drawn_conversation,
    named_templates,
    tokenizer_for,
    trl_templates,
)

TEMPLATES = {**trl_templates(), **{f"lorakit {name}": text for name, text in named_templates().items()}}
CONVERSATIONS = conversations()


@cache
def tokenizer_of(name: str) -> Any:
    return tokenizer_for(TEMPLATES[name])


def encode(name: str, row: Any, turns: str = "auto") -> list[Encoded]:
    """Return the rows that a conversation becomes; none if it is refused."""
    try:
        return Encoder(tokenizer_of(name), RowSettings(turns=turns))(row)
    except BadRow:
        return []


def runs(encoded: Encoded) -> list[tuple[int, int]]:
    """Return (start, stop) of every run of labels."""
    mask = [False, *encoded.label_mask, False]
    edges = [index for index in range(len(encoded.ids) + 1) if mask[index] != mask[index + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def texts_of(message: dict[str, Any]) -> list[str]:
    """Return the texts that a message consists of: content without thinking, thinking, names and arguments of calls."""
    parts = [*str(message.get("content") or "").split("</think>"), str(message.get("reasoning_content", ""))]
    for called in message.get("tool_calls", ()):
        arguments = called["function"]["arguments"]
        mapping = json.loads(arguments) if isinstance(arguments, str) else arguments
        parts += [called["function"]["name"], *map(str, mapping.values())]
    return [part for part in (text.strip().removeprefix("<think>").strip() for text in parts) if part]


def check(name: str, row: Any) -> int:
    """Assert the law for one conversation and template; return the number of rows, 0 if it is refused."""
    tokenizer = tokenizer_of(name)
    rows = encode(name, row)
    if not rows:
        return 0
    chat = to_conversation(row)
    assert isinstance(chat, Chat)
    asked = {}
    for index, message in enumerate(chat.messages):
        if message["role"] == "assistant" and index:
            prompt = render_template(tokenizer, chat.messages[:index], chat.tools, prompt=True)
            asked[index] = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    answered = []
    for encoded in rows:
        for start, stop in runs(encoded):
            answer = tokenizer.decode(encoded.ids[start:stop])
            index = next((i for i, ids in asked.items() if ids == encoded.ids[:start] and chat.trained[i]), 0)
            assert index or chat.trained[0], f"answered after a prompt that is not asked: {answer!r}"
            answered.append(index)
            message = chat.messages[index]
            for text in texts_of(message):
                forms = (text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1])
                assert any(form in answer for form in forms), f"{text!r} is not in the labels {answer!r}"
            others = [t for other in chat.messages for t in texts_of(other) if other is not message]
            alien = [text for text in others if text in answer and text not in str(message)]
            assert not alien, f"{alien} of another message is in the labels {answer!r}"
            last = tokenizer.convert_ids_to_tokens(encoded.ids[stop - 1])
            assert last in tokenizer.get_added_vocab(), f"the labels {answer!r} end without an end token"
            assert tokenizer.decode(encoded.ids[stop - 1 : stop]) != answer, "the answer is its end token alone"
    assert sorted(answered) == [index for index, trained in enumerate(chat.trained) if trained]
    return len(rows)


@pytest.mark.parametrize("name", TEMPLATES)
def test_labels_are_each_answer_as_it_is_asked_or_the_row_is_refused(name: str) -> None:
    trained = {title: check(name, row) for title, row in CONVERSATIONS.items()}
    assert trained["one turn"]
    assert not trained["blank answer"]


@pytest.mark.parametrize("number", [10, pytest.param(60, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_law_holds_for_drawn_conversations(name: str, number: int) -> None:
    rows = [check(name, drawn_conversation(seed)) for seed in range(number)]
    assert any(rows)


@pytest.mark.parametrize("name", ["llama3_1", "qwen2_5", "qwen3", "gptoss", "deepseekv3"])
def test_arguments_as_text_are_trained_as_arguments_that_are_a_mapping(name: str) -> None:
    without_tools = [{"messages": CONVERSATIONS[title]["messages"]} for title in ("call as text", "call")]
    as_text, as_mapping = (encode(name, row) for row in without_tools)
    assert as_text
    assert [(one.ids, one.label_mask) for one in as_text] == [(one.ids, one.label_mask) for one in as_mapping]
    assert '\\"' not in tokenizer_of(name).decode(as_text[0].ids)


def test_conversations_become_rows_as_turns_says() -> None:
    def lengths(turns: str, name: str = "qwen3") -> list[int]:
        rows = encode(name, CONVERSATIONS["three turns"], turns)
        return [len(runs(one)) for one in rows]

    assert lengths("auto") == [1, 1, 1]  # Qwen3 shows empty thinking in the last answer alone
    assert lengths("each") == [1, 1, 1]
    assert lengths("last") == [1]
    assert lengths("auto", "qwen2_5") == lengths("all", "qwen2_5") == [3]
    assert lengths("each", "qwen2_5") == [1, 1, 1]
    shows = (
        "data.turns: all: the chat template shows an earlier answer in another form once others follow; `auto` makes"
    )
    with pytest.raises(BadRow, match=shows):
        Encoder(tokenizer_of("qwen3"), RowSettings(turns="all"))(CONVERSATIONS["three turns"])


@pytest.mark.parametrize(
    ("title", "kept", "ending"),
    [
        ("assistant twice", (0, 1, 2), "; join them into one"),
        ("call and answer", (0, 1, 3), "; a tool result is missing"),
    ],
)
def test_an_answer_after_an_answer_is_named_where_it_is_refused(title: str, kept: tuple[int, ...], ending: str) -> None:
    messages = [CONVERSATIONS[title]["messages"][index] for index in kept]
    with pytest.raises(BadRow) as caught:
        Encoder(tokenizer_of("qwen3"), RowSettings())({**CONVERSATIONS[title], "messages": messages})
    assert str(caught.value) == f"message 3: an assistant message follows an assistant message{ending}"


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("qwen3", {"enable_thinking"}),
        ("llama3_2", {"custom_tools", "date_string", "tools_in_user_message"}),
        ("gptoss", {"builtin_tools", "model_identity", "reasoning_effort"}),
    ],
)
def test_the_variables_of_a_template_are_those_that_it_does_not_set_itself(name: str, variables: set[str]) -> None:
    assert template_variables(TEMPLATES[name]) == variables
    with pytest.raises(DataError, match=r"content: the chat template reads no such variable; it reads "):
        Encoder(tokenizer_of(name), RowSettings(template_kwargs={"content": "x"}))


@pytest.mark.matrix
def test_the_page_of_templates_is_what_is_found() -> None:
    assert PAGE.read_text() == page(), "run python -m scripts.templates_page"
