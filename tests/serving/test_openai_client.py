"""OpenAI's own client reads every kind of reply, and refuses those that are not of OpenAI's form.

Two are read without that, because its types do not allow a null that OpenAI's API has: the reason to finish of a
streamed text before its end, and the log-probability of an echo's first token.
"""

from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from lorakit.inference.adapted_model import AdaptedModel
from lorakit.serving.app import OpenAIServer
from lorakit.serving.engine import ServingEngine
from tests.helpers.http_server import serving
from tests.helpers.serving import held_forwards

CHAT: Any = {"model": "a", "messages": [{"role": "user", "content": "say hi"}], "max_tokens": 6, "temperature": 0}
TEXT: Any = {"model": "a", "prompt": "hi there", "max_tokens": 6, "temperature": 0}
TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(scope="module")
def address(model: AdaptedModel, engine: ServingEngine) -> Iterator[str]:
    with serving(OpenAIServer(model, engine, "tiny", ["secret"]).app) as address:
        yield f"{address}/v1"


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=address, api_key="secret", max_retries=0, _strict_response_validation=True) as opened:
        yield opened


def test_a_chat_with_tools_a_format_and_logprobs(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "one", "schema": {"const": "yes"}}}
    reply = client.chat.completions.create(**CHAT, tools=[TOOL], response_format=form, logprobs=True, top_logprobs=3)

    (choice,) = reply.choices
    assert choice.message.content == '"yes"'
    assert choice.message.tool_calls is None
    assert choice.logprobs is not None
    assert "".join(one.token for one in choice.logprobs.content or []) == '"yes"'
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None


def test_tools_are_part_of_the_prompt(client: openai.OpenAI) -> None:
    without, with_tool = (client.chat.completions.create(**CHAT, tools=tools).usage for tools in ([], [TOOL]))
    assert without is not None
    assert with_tool is not None
    assert with_tool.prompt_tokens > without.prompt_tokens


def test_a_streamed_chat_with_logprobs_and_usage(client: openai.OpenAI) -> None:
    full = client.chat.completions.create(**CHAT, logprobs=True, n=2)
    texts, tokens, usage = ["", ""], 0, None
    for chunk in client.chat.completions.create(
        **CHAT, logprobs=True, n=2, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            tokens += len(choice.logprobs.content or []) if choice.logprobs else 0
    assert texts == [choice.message.content for choice in full.choices]
    assert usage == full.usage
    assert tokens == full.usage.completion_tokens if full.usage else 0


class Order(BaseModel):
    """What the client makes a schema of."""

    item: Literal["lamp", "chair"]
    paid: bool


def test_the_clients_helpers_parse_an_answer_and_a_stream(client: openai.OpenAI) -> None:
    fields: Any = CHAT | {"max_tokens": 60, "temperature": 1.0, "seed": 1, "response_format": Order}
    order = client.chat.completions.parse(**fields).choices[0].message.parsed
    with client.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(order, Order)
    assert streamed == order


def test_a_text_with_logprobs(client: openai.OpenAI) -> None:
    (choice,) = client.completions.create(**TEXT, logprobs=2).choices
    logprobs = choice.logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == choice.text
    assert (
        len(logprobs.token_logprobs or []) == len(logprobs.text_offset or []) == len(logprobs.top_logprobs or []) == 6
    )


def test_an_echo_with_logprobs(address: str) -> None:
    with openai.OpenAI(base_url=address, api_key="secret", max_retries=0) as other:
        (choice,) = other.completions.create(**TEXT, echo=True, logprobs=2).choices
    assert choice.text.startswith("hi there")
    assert choice.logprobs is not None
    assert (choice.logprobs.token_logprobs or [0])[0] is None


def test_a_batch_of_texts_and_a_stream_of_them(client: openai.OpenAI, address: str) -> None:
    full = client.completions.create(**TEXT | {"prompt": ["hi there", "hi"]}, n=2, seed=1)
    with openai.OpenAI(base_url=address, api_key="secret", max_retries=0) as other:
        texts = [""] * 4
        for chunk in other.completions.create(**TEXT | {"prompt": ["hi there", "hi"]}, n=2, seed=1, stream=True):
            (choice,) = chunk.choices
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in full.choices]


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    assert [card.id for card in client.models.list()] == ["tiny", "a", "b"]
    assert client.models.retrieve("b").owned_by == "lorakit"


def test_errors_are_the_clients_exceptions(model: AdaptedModel, client: openai.OpenAI, address: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("nobody")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**CHAT, tool_choice="required")
    assert (refused.value.param, refused.value.type) == ("tool_choice", "invalid_request_error")
    with (
        openai.OpenAI(base_url=address, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
    with held_forwards(model), pytest.raises(openai.APITimeoutError):  # which no answer is early enough for
        client.completions.create(**TEXT, timeout=httpx.Timeout(0.05))
