"""What a chat request says to the chat template: variables, and the arguments of earlier calls as clients send them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import lorakit
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.serving.app import OpenAIServer
from lorakit.serving.engine import ServingEngine
from tests.helpers.http_server import serving

TEMPLATE = (
    "{% for m in messages %}{{ '<|user|>' + m.role + ': ' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}"
    "{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{{ 'no thinking: ' if not enable_thinking }}{% endif %}"
)
USER: dict[str, Any] = {"role": "user", "content": "say hi"}


@pytest.fixture(scope="module")
def templated(base: Path) -> AdaptedModel:
    return lorakit.load(base, dtype="float32", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def client(templated: AdaptedModel) -> Iterator[httpx.Client]:
    engine = ServingEngine(templated, max_rows=2)
    with serving(OpenAIServer(templated, engine, "tiny", []).app) as address, httpx.Client(base_url=address) as opened:
        yield opened
    engine.close()


def prompt_of(client: httpx.Client, **body: Any) -> str:
    tokens = client.post("/tokenize", json={"model": "tiny", **body}).raise_for_status().json()["tokens"]
    reply = client.post("/detokenize", json={"model": "tiny", "tokens": tokens})
    return str(reply.raise_for_status().json()["prompt"])


def test_variables_of_a_request_reach_the_template(client: httpx.Client, templated: AdaptedModel) -> None:
    assert prompt_of(client, messages=[USER]).endswith("<|assistant|>no thinking: ")
    kwargs = {"enable_thinking": True}
    assert prompt_of(client, messages=[USER], chat_template_kwargs=kwargs).endswith("<|assistant|>")

    body = {"model": "tiny", "messages": [USER], "temperature": 0, "max_tokens": 4, "chat_template_kwargs": kwargs}
    reply = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    (expected,) = templated.generate([[USER]], max_new_tokens=4, chat_template_kwargs=kwargs)
    assert reply["choices"][0]["message"]["content"] == expected

    unread = client.post("/v1/chat/completions", json=body | {"chat_template_kwargs": {"thinking": True}})
    assert unread.status_code == 400
    error = unread.json()["error"]
    said = "thinking: the chat template reads no such variable; it reads enable_thinking"
    assert (error["param"], error["message"]) == ("chat_template_kwargs", f"chat_template_kwargs: {said}")
    effort = client.post("/v1/chat/completions", json=body | {"reasoning_effort": "low"}).json()["error"]
    assert effort["param"] == "reasoning_effort"
    assert effort["message"] == said.replace("thinking:", "reasoning_effort:", 1)


def test_arguments_of_a_call_are_written_as_the_template_writes_a_mapping(client: httpx.Client) -> None:
    def asked(arguments: Any) -> str:
        call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
        return prompt_of(client, messages=[USER, {"role": "assistant", "content": "", "tool_calls": [call]}, USER])

    assert 'look {"place": "Oslo"}' in asked('{"place": "Oslo"}')
    assert 'look ""' in asked("")
    for broken in ('{"place": "Os', "{cut", '{"a": NaN}', '{"a": 1, "a": 2}', '{"a": 1,}', '{"日本": "🎉'):
        shown = json.dumps({"INVALID_JSON": broken}, ensure_ascii=False)
        assert f"look {shown}" in asked(broken)


@pytest.mark.parametrize(
    ("arguments", "result", "message"),
    [
        *((text, "1", "messages[1].tool_calls[0].function.arguments: the text of a JSON object is required, got")
          for text in ("cut", "[1]", '"text"', "null")),
        ("{}", "2", "messages: no call has the id '2' of a tool's result"),
    ],
)  # fmt: skip
def test_calls_and_results_that_do_not_fit_are_refused_by_name(
    client: httpx.Client, arguments: str, result: str, message: str
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": result, "content": "sunny"},
    ]
    reply = client.post("/v1/chat/completions", json={"model": "tiny", "messages": messages, "max_tokens": 3})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(message)
    call["function"] = {"name": "look", "arguments": '{"a": 1}'}
    fitting = [*messages[:2], messages[2] | {"tool_call_id": "1"}]
    assert client.post("/v1/chat/completions", json={"model": "tiny", "messages": fitting, "max_tokens": 3}).is_success


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "assistant", "content": "x", "mood": "glad"}, "mood"),
        ({"role": "user", "content": "x", "mood": "glad"}, "mood"),
        ({"role": "user", "content": "x", "name": "Ada"}, "name"),
    ],
)
def test_what_the_template_does_not_show_is_refused_in_a_chat_and_in_its_tokens(
    client: httpx.Client, message: dict[str, Any], said: str
) -> None:
    body = {"model": "tiny", "messages": [message, USER]}
    for path in ("/v1/chat/completions", "/tokenize"):
        reply = client.post(path, json=body)
        assert reply.status_code == 400, path
        assert said in reply.json()["error"]["message"]


def test_thinking_of_an_earlier_turn_may_be_left_out_as_templates_do(client: httpx.Client) -> None:
    earlier = {"role": "assistant", "content": "x", "reasoning_content": "hm"}
    assert client.post("/tokenize", json={"model": "tiny", "messages": [USER, earlier, USER]}).status_code == 200
