"""Thinking and tool calls of answers, as OpenAI's own client and an agent's loop get them.

The bases have random weights, so a grammar makes them write an answer: `tool_choice`, or `response_format: regex` for the
text that a trained model would write by itself. "In letters": a tokenizer without tokens for the marks of thinking and
calls, because a regular expression is obeyed letter by letter.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

import lorakit
from lorakit.serving.app import OpenAIServer
from lorakit.serving.engine import ServingEngine
from tests.helpers.bases import make_base
from tests.helpers.chat_templates import tokenizer_for, trl_templates
from tests.helpers.http_server import serving

USER: Any = {"role": "user", "content": "How is the weather?"}
PARAMETERS: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"type": "integer", "enum": [3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather_of", "description": "Weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop", "description": "End", "parameters": {"type": "object"}}},
]
FAMILIES = ["qwen2_5", "qwen3", "qwen3_6", "llama3_1", "glm4moe", "gptoss"]
PLAIN: Any = {"glm4moe": {"chat_template_kwargs": {"enable_thinking": False}}}
Clients = Callable[[str], openai.OpenAI]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    opened: dict[str, openai.OpenAI] = {}
    closing: list[Callable[[], Any]] = []

    def of_family(family: str) -> openai.OpenAI:
        if family not in opened:
            template = trl_templates()[family.removesuffix("_in_letters")]
            tokenizer = tokenizer_for("<|im_start|><|im_end|>" if family.endswith("_in_letters") else template)
            tokenizer.chat_template = template
            folder = make_base(tmp_path_factory.mktemp("bases") / family, tokenizer, max_position_embeddings=4096)
            model = lorakit.load(folder, dtype="float32")
            engine = ServingEngine(model, max_rows=4)
            running = serving(OpenAIServer(model, engine, "base", []).app)
            address = running.__enter__()
            opened[family] = openai.OpenAI(
                base_url=f"{address}/v1", api_key="-", max_retries=0, _strict_response_validation=True
            )
            closing.extend([engine.close, lambda: running.__exit__(None, None, None), opened[family].close])
        return opened[family]

    yield of_family
    for close in reversed(closing):
        close()


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    settings: Any = {"model": "base", "messages": [USER], "tools": TOOLS, "max_tokens": 400, "seed": 1}
    return client.chat.completions.create(**settings | fields)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_required_call_is_read_at_once_and_streamed(client: Clients, family: str) -> None:
    fields: Any = {
        "tool_choice": {"type": "function", "function": {"name": "weather_of"}},
        "parallel_tool_calls": False,
    }
    if family in ("qwen3", "qwen3_6", "glm4moe"):  # random weights would not close a thought
        fields["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
    (choice,) = ask(client(family), **fields).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert call.function.name == "weather_of"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Paris", "Rome")
    assert arguments["days"] == 3

    with client(family).chat.completions.stream(
        model="base", messages=[USER], tools=TOOLS, max_tokens=400, seed=1, **fields
    ) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls"
    assert streamed.message.tool_calls is not None
    assert [one.function.arguments for one in streamed.message.tool_calls] == [call.function.arguments]
    assert (streamed.message.content or None) == choice.message.content


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["qwen2_5", "qwen3_6", "glm4moe"])
def test_a_chat_with_tools_and_a_form_may_have_either(client: Clients, family: str) -> None:
    schema = {
        "type": "object", "properties": {"ok": {"enum": [True]}}, "required": ["ok"], "additionalProperties": False
    }  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    found = set[str]()
    for seed in itertools.takewhile(lambda seed: seed < 40 and len(found) < 2, itertools.count()):
        (choice,) = ask(
            client(family), tools=TOOLS[:1], response_format=form, seed=seed, parallel_tool_calls=False,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}} if family == "qwen3_6" else {},
        ).choices  # fmt: skip
        found.add(choice.finish_reason)
        if choice.finish_reason == "tool_calls":
            (call,) = choice.message.tool_calls
            assert json.loads(call.function.arguments)["days"] == 3
        else:
            assert json.loads(choice.message.content) == {"ok": True}
    assert found == {"stop", "tool_calls"}


def test_json_after_a_thought_is_content_and_the_thought_is_none(client: Clients) -> None:
    (choice,) = ask(client("qwen3_6"), tools=None, response_format={"type": "json_object"}, max_tokens=20).choices
    assert choice.finish_reason == "length"  # random weights do not close a thought
    assert not choice.message.content
    assert choice.message.reasoning_content
    assert not choice.message.reasoning_content.startswith("{")


@pytest.mark.parametrize(
    ("parallel", "most"),
    [(None, 1), *(pytest.param(*one, marks=pytest.mark.matrix) for one in ((False, 1), (True, 9)))],
)
def test_a_named_function_is_called_once_unless_several_calls_are_asked_for(
    client: Clients, parallel: bool | None, most: int
) -> None:
    named = {"type": "function", "function": {"name": "weather_of"}}
    several = {} if parallel is None else {"parallel_tool_calls": parallel}
    numbers = set[int]()
    for seed in range(12):
        (choice,) = ask(client("qwen2_5"), tool_choice=named, seed=seed, max_tokens=200, **several).choices
        numbers.add(len(choice.message.tool_calls))
    assert min(numbers) == 1
    assert (max(numbers) > 1) == (most > 1)


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_content_and_calls_are_told_apart(client: Clients, stream: bool) -> None:
    text = 'hm, 3 < 4\n</think>\n\nI look\n<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    form = {"type": "regex", "pattern": f"<think>\n{text}".replace("(", r"\(").replace("{", r"\{").replace("}", r"\}")}
    reply = ask(client("qwen3_in_letters"), response_format=form, stream=stream, logprobs=True)
    if stream:
        chunks = [chunk.choices[0] for chunk in reply]
        deltas = [chunk.delta.model_dump(exclude_none=True) for chunk in chunks]
        thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
        content = "".join(delta.get("content", "") for delta in deltas)
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        reason = chunks[-1].finish_reason
        assert len([delta for delta in deltas if "reasoning_content" in delta]) > 3
    else:
        message = reply.choices[0].message.model_dump()
        thought, content, calls = message["reasoning_content"], message["content"], message["tool_calls"]
        reason = reply.choices[0].finish_reason
    assert (thought, content, reason) == ("hm, 3 < 4", "I look", "tool_calls")
    names = [call["function"]["name"] for call in calls if "name" in call["function"]]
    assert (names, "".join(call["function"]["arguments"] for call in calls)) == (["stop"], "{}")


def deltas_of(reply: Any) -> tuple[list[Any], str | None]:
    """Return the pieces of a stream's calls, and why it ended."""
    chunks = [chunk.choices[0] for chunk in reply]
    pieces = [chunk.delta.tool_calls for chunk in chunks if chunk.delta.tool_calls]
    assert all(len(calls) == 1 for calls in pieces)
    return [calls[0] for calls in pieces], chunks[-1].finish_reason


@pytest.mark.parametrize("family", ["qwen3_6", "glm4moe"])
def test_a_long_string_in_frames_is_streamed_as_it_comes_and_stays_a_call_if_it_is_cut(
    client: Clients, family: str
) -> None:
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    fields: Any = {
        "tools": [{"type": "function", "function": {"name": "write", "description": "W", "parameters": parameters}}],
        "tool_choice": "required", "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}, "max_tokens": 150,
    }  # fmt: skip
    (choice,) = ask(client(family), **fields).choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("length", None)  # random weights do not end a string
    assert call.function.arguments.startswith('{"text": "')
    pieces, reason = deltas_of(ask(client(family), stream=True, **fields))
    assert (pieces[0].function.name, reason) == ("write", "length")
    assert "".join(one.function.arguments for one in pieces) == call.function.arguments
    assert len(pieces) > 30


@pytest.mark.parametrize("family", ["qwen2_5", "llama3_1", "gptoss"])
def test_arguments_are_streamed_as_they_come_after_the_name_of_their_call(client: Clients, family: str) -> None:
    fields: Any = {"tool_choice": "required", "parallel_tool_calls": False}
    (call,) = ask(client(family), **fields).choices[0].message.tool_calls
    pieces, reason = deltas_of(ask(client(family), stream=True, **fields))
    first, *others = pieces
    assert (first.index, first.type, first.function.name, first.function.arguments) == (
        0,
        "function",
        call.function.name,
        "",
    )
    assert first.id
    assert all((one.index, one.id, one.type, one.function.name) == (0, None, None, None) for one in others)
    assert "".join(one.function.arguments for one in others) == call.function.arguments
    assert len(others) == len(call.function.arguments)  # a token of this tokenizer is a letter
    assert reason == "tool_calls"


def test_a_call_that_is_cut_has_the_beginning_of_its_arguments(client: Clients) -> None:
    fields: Any = {"tool_choice": {"type": "function", "function": {"name": "weather_of"}}, "max_tokens": 55}
    (choice,) = ask(client("qwen2_5"), **fields).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "length"
    assert '{"city": "Rome", "days": 3}'.startswith(call.function.arguments.replace("Paris", "Rome")) is True
    assert call.function.arguments
    pieces, reason = deltas_of(ask(client("qwen2_5"), stream=True, **fields))
    assert ("".join(one.function.arguments for one in pieces), reason) == (call.function.arguments, "length")


@pytest.mark.parametrize("family", ["qwen2_5", "glm4moe", "gptoss"])
def test_a_loop_goes_on_from_a_call_that_was_cut(client: Clients, family: str) -> None:
    named = {"type": "function", "function": {"name": "weather_of"}}
    for number in itertools.count(20):  # until the arguments have begun
        fields: Any = {"tool_choice": named, "max_tokens": number, "extra_body": PLAIN.get(family, {})}
        (choice,) = ask(client(family), **fields).choices
        if choice.message.tool_calls and choice.message.tool_calls[0].function.arguments:
            break
    result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "these arguments are no JSON"}
    ask(
        client(family),
        messages=[USER, choice.message.to_dict(), result],
        extra_body=PLAIN.get(family, {}),
        max_tokens=3,
    )


def test_parameters_with_definitions_are_those_of_the_call(client: Clients) -> None:
    stop = {"type": "object", "properties": {"at": {"enum": [1, 2]}}, "required": ["at"], "additionalProperties": False}
    parameters = {
        "type": "object",
        "properties": {"stop": {"$ref": "#/$defs/Stop"}},
        "required": ["stop"],
        "$defs": {"Stop": stop},
    }
    tools: Any = [{"type": "function", "function": {"name": "halt", "description": "Halt", "parameters": parameters}}]
    for family in ("qwen2_5", "gptoss"):
        (call,) = (
            ask(client(family), tools=tools, tool_choice="required", parallel_tool_calls=False)
            .choices[0]
            .message.tool_calls
        )
        assert json.loads(call.function.arguments)["stop"]["at"] in (1, 2)


@pytest.mark.parametrize("family", ["qwen2_5", "glm4moe"])
@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"properties": [1]}, "tools: "),
        ({"type": "object", "properties": {"a": 5}}, ""),
        ({"type": "object", "patternProperties": {"^[ab]$": {}}}, "tools: patternProperties: the names of '^[ab]$'"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "tools: $ref '#' requires itself"),
    ],
)
def test_parameters_that_no_call_obeys_are_refused(client: Clients, family: str, parameters: Any, said: str) -> None:
    tools: Any = [{"type": "function", "function": {"name": "halt", "description": "Halt", "parameters": parameters}}]
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client(family), tools=tools, tool_choice="required")
    assert said in refused.value.message


def test_without_tools_or_with_none_the_text_stays_content(client: Clients) -> None:
    form = {"type": "regex", "pattern": r"<tool_call>\{\}</tool_call>"}
    for fields in ({"tools": openai.NOT_GIVEN}, {"tool_choice": "none"}):
        (choice,) = ask(client("qwen2_5_in_letters"), response_format=form, **fields).choices
        assert choice.message.content == "<tool_call>{}</tool_call>"
        assert choice.message.tool_calls is None
        assert choice.finish_reason == "stop"


def test_an_agents_loop_goes_on_from_calls_and_results(client: Clients) -> None:
    messages: list[Any] = [{"role": "developer", "content": "Be brief."}, USER]
    for _ in range(3):
        # random weights would not close a thought
        plain: Any = {"chat_template_kwargs": {"enable_thinking": False}}
        reply = ask(client("qwen3"), messages=messages, tool_choice="required", extra_body=plain).choices[0].message
        assert reply.tool_calls
        messages.append(reply.to_dict())
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in reply.tool_calls]
    assert ask(client("qwen3"), messages=messages, tool_choice="none").choices[0].message.tool_calls is None


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("gemma3", {}, "tools: the chat template leaves them out"),
        ("gemma3", {"tools": openai.NOT_GIVEN, "messages": [{**USER, "name": "Ada"}]}, "name"),
        ("qwen2_5", {"messages": [USER, {"role": "critic", "content": "no"}]}, "message 2 (critic)"),
        ("qwen2_5", {"messages": [{**USER, "mood": "glad"}]}, "mood"),
        ("qwen2_5", {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "content"),
        ("qwen2_5", {"messages": [USER, {"role": "assistant", "tool_calls": "x"}]}, "tool_calls"),
        ("qwen2_5", {"tools": [{}]}, "tools"),
        ("qwen2_5", {"tool_choice": {"type": "function", "function": {"name": "other"}}}, "'other'"),
        ("qwen2_5", {"tools": openai.NOT_GIVEN, "tool_choice": "required"}, "tool_choice"),
        ("qwen2_5", {"reasoning_effort": "low"}, "reasoning_effort"),
    ],
)
def test_a_part_that_the_template_does_not_show_is_refused_by_name(
    client: Clients, family: str, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client(family), **fields)
    assert named in refused.value.message
