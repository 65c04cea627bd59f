"""OpenAI's own client, with strict validation, over real HTTP: every answer is the one Python gives."""

import contextlib
import http.client
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

import lorakit
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.serving import completion_routes as completion_routes_module
from lorakit.serving.app import OpenAIServer
from lorakit.serving.engine import ServingEngine
from lorakit.serving.requests import UNUSED
from tests.helpers import patient
from tests.helpers.http_server import serving
from tests.helpers.patches import make_patch
from tests.helpers.serving import held_forwards, wait_until

MESSAGES: Any = [{"role": "user", "content": "say hi"}]


KEY = {"Authorization": "Bearer other"}


@pytest.fixture(scope="module")
def served(model: AdaptedModel, engine: ServingEngine) -> Iterator[str]:
    """The address of a running server whose base is named `tiny` and whose keys are `secret` and `other`."""
    with serving(OpenAIServer(model, engine, "tiny", ["secret", "other"]).app) as address:
        yield address


@pytest.fixture(scope="module")
def client(served: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{served}/v1", api_key="secret", max_retries=0, _strict_response_validation=True
    ) as opened:
        yield opened


@pytest.mark.parametrize("name", ["a", "b", "tiny"])
def test_a_chat_is_what_python_answers_with_that_adapter(client: openai.OpenAI, model: AdaptedModel, name: str) -> None:
    expected = model.generate([MESSAGES], None if name == "tiny" else name, max_new_tokens=12)[0]
    arguments: Any = {"model": name, "messages": MESSAGES, "temperature": 0, "max_tokens": 12}

    answer = client.chat.completions.create(**arguments)
    chunks = list(client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))

    assert answer.choices[0].message.content == expected
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == expected
    assert chunks[-2].choices[0].finish_reason == answer.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage == answer.usage


def test_the_base_answers_to_its_folder_too(client: openai.OpenAI, model: AdaptedModel) -> None:
    folder = str(model.folder)
    expected = model.generate([MESSAGES], None, max_new_tokens=8)[0]
    answer = client.chat.completions.create(model=folder, messages=MESSAGES, temperature=0, max_tokens=8)
    assert answer.choices[0].message.content == expected
    assert folder not in [one.id for one in client.models.list()]


def test_a_text_is_given_as_it_is_and_so_are_token_ids(client: openai.OpenAI, model: AdaptedModel) -> None:
    ids = model.prompts.token_ids("hi there", lorakit.patch.prompting.PromptForm(raw=True))
    expected = [model.generate([prompt], "a", max_new_tokens=8, raw=True)[0] for prompt in ("hi there", "hi")]
    common: Any = {"model": "a", "temperature": 0, "max_tokens": 8}

    assert [
        choice.text for choice in client.completions.create(prompt=["hi there", "hi"], **common).choices
    ] == expected
    assert client.completions.create(prompt=ids, **common).choices[0].text == expected[0]


@pytest.mark.parametrize("kind", ["chat/completions", "completions"])
def test_a_stream_is_role_deltas_reason_usage_and_done(served: str, kind: str) -> None:
    prompt: Any = {"messages": MESSAGES} if kind.startswith("chat") else {"prompt": "hi"}
    body = {"model": "a", "max_tokens": 6, "min_tokens": 6, "n": 2, "stream": True, **prompt}
    for options in ({"stream_options": {"include_usage": True}}, {}):
        reply = patient.post(f"{served}/v1/{kind}", json=body | options, headers={"Authorization": "Bearer secret"})
        assert reply.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
        assert events.pop() == "[DONE]"
        chunks = [json.loads(event) for event in events]
        if options:
            usage = chunks.pop()
            assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 12)
            assert all(chunk["usage"] is None for chunk in chunks)
        else:
            assert not any("usage" in chunk for chunk in chunks)
        assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in chunks}) == 1
        for index in range(2):
            own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
            assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]
            if kind.startswith("chat"):
                roles = [choice["delta"].get("role") for choice in own]
                assert roles == ["assistant"] + [None] * (len(own) - 1)
                assert own[-1]["delta"] == {} or "content" in own[-1]["delta"]


@pytest.mark.parametrize("name", ["a", "tiny"])
def test_an_echo_has_the_log_probabilities_of_the_prompt(
    served: str, model: AdaptedModel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion_routes_module, "CHUNK_TOKENS", 3)
    ids = model.prompts.token_ids("hi there, how are you", lorakit.patch.prompting.PromptForm(raw=True))
    logits = model(torch.tensor([ids]), adapters=None if name == "tiny" else name).logits[0].log_softmax(-1)
    expected = [float(logits[index, token]) for index, token in enumerate(ids[1:])]
    headers = {"Authorization": "Bearer secret"}
    body = {"model": name, "prompt": "hi there, how are you", "echo": True, "logprobs": 2, "temperature": 0}

    def ask(**more: Any) -> Any:
        return patient.post(f"{served}/v1/completions", json=body | more, headers=headers).json()

    alone = ask(max_tokens=0)
    (choice,) = alone["choices"]
    assert choice["text"] == "hi there, how are you"
    assert choice["finish_reason"] == "length"
    assert alone["usage"]["completion_tokens"] == 0
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)
    for index, top in enumerate(logprobs["top_logprobs"][1:]):
        values = sorted(top.values(), reverse=True)
        assert values[:2] == pytest.approx(logits[index].topk(2).values.tolist(), abs=1e-4)
        assert logprobs["token_logprobs"][index + 1] in values  # with the token itself
        assert len(values) <= 3
    chat = ask(prompt=model.prompts.token_ids(MESSAGES, lorakit.patch.prompting.PromptForm()), max_tokens=0)["choices"][
        0
    ]
    for one in (choice, chat):  # special tokens are not in a text
        tokens, offsets = one["logprobs"]["tokens"], one["logprobs"]["text_offset"]
        assert set(tokens) - set(model.tokenizer.all_special_tokens)
        for token, offset in zip(tokens, offsets, strict=True):
            assert one["text"][offset:].startswith(token) or token in model.tokenizer.all_special_tokens

    without = ask(max_tokens=4, min_tokens=4, echo=False)["choices"][0]
    (both,) = ask(max_tokens=4, min_tokens=4)["choices"]
    assert both["text"] == "hi there, how are you" + without["text"]
    assert len(both["logprobs"]["tokens"]) == len(ids) + 4
    assert both["logprobs"]["token_logprobs"][len(ids) :] == pytest.approx(
        without["logprobs"]["token_logprobs"], abs=1e-4
    )
    by_ids = ask(prompt=[ids, ids], max_tokens=0, logprobs=None)["choices"]
    assert [one["text"] for one in by_ids] == ["hi there, how are you"] * 2
    assert ask(prompt=[1] * 300, max_tokens=0)["error"]["message"].startswith(
        "This model's maximum context length is 256 tokens; 300 tokens and 0 new ones, and at most"
    )
    assert "max_tokens: 1 or more" in ask(max_tokens=0, echo=False)["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_token_of_a_text_is_in_its_log_probabilities(served: str, model: AdaptedModel, stream: bool) -> None:
    (end,) = model.prompts.end_ids
    ids = model.prompts.token_ids("hi there", lorakit.patch.prompting.PromptForm(raw=True))
    body = {"model": "a", "prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 1, "logit_bias": {str(end): 100}}
    reply = patient.post(
        f"{served}/v1/completions", json=body | {"stream": stream}, headers={"Authorization": "Bearer secret"}
    )
    events = reply.text.split("\n\n")[:-2] if stream else [reply.text]  # the last one is [DONE]
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    tokens, values, offsets = (
        [one for choice in choices if choice["logprobs"] for one in choice["logprobs"][name]]
        for name in ("tokens", "token_logprobs", "text_offset")
    )
    assert "".join(choice["text"] for choice in choices) == "hi there"
    assert tokens[-1] == model.tokenizer.decode([end])
    assert len(tokens) == len(values) == len(offsets) == len(ids) + 1
    assert values[-1] == pytest.approx(0, abs=1e-6)  # by its bias
    assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("name", ["a", "tiny", None])
def test_tokens_are_those_of_a_completion_and_go_back_to_text(
    served: str, model: AdaptedModel, name: str | None
) -> None:
    with patient.Client(base_url=served, headers={"Authorization": "Bearer secret"}) as client:

        def tokenize(**body: Any) -> Any:
            return client.post("/tokenize", json=({"model": name} if name else {}) | body).json()

        form = lorakit.patch.prompting.PromptForm(raw=True)
        text = tokenize(prompt="hi there")
        assert text["tokens"] == model.prompts.token_ids("hi there", form)
        assert (text["count"], text["max_model_len"]) == (len(text["tokens"]), 256)
        assert text["token_strs"] is None
        bare = tokenize(prompt="hi there", add_special_tokens=False, return_token_strs=True)
        assert bare["tokens"] == model.tokenizer("hi there", add_special_tokens=False)["input_ids"]
        assert bare["token_strs"] == model.tokenizer.convert_ids_to_tokens(bare["tokens"])
        chat = tokenize(messages=MESSAGES)["tokens"]
        assert chat == model.prompts.token_ids(MESSAGES, form)
        asked = tokenize(messages=MESSAGES, add_generation_prompt=False)["tokens"]
        assert asked == chat[: len(asked)] != chat
        assert client.post("/detokenize", json={"tokens": bare["tokens"]}).json() == {"prompt": "hi there"}
        assert client.post("/detokenize", json={"tokens": chat}).json()["prompt"] == model.tokenizer.decode(chat)


@pytest.mark.parametrize(
    ("route", "body", "status", "said"),
    [
        ("tokenize", {}, 400, "one of prompt and messages"),
        ("tokenize", {"prompt": "hi", "messages": MESSAGES}, 400, "one of prompt and messages"),
        ("tokenize", {"prompt": ["hi"]}, 400, "prompt: should be a valid string"),
        ("tokenize", {"prompt": "hi", "add_generation_prompt": True}, 400, "goes with messages"),
        ("tokenize", {"messages": MESSAGES, "add_special_tokens": True}, 400, "not with messages"),
        ("tokenize", {"prompt": "hi", "model": "nobody"}, 404, "there are tiny, a, b"),
        ("tokenize", {"messages": MESSAGES, "chat_template": "{{"}, 400, "chat_template: not supported here"),
        ("detokenize", {}, 400, "tokens: is required"),
        ("detokenize", {"tokens": [-1]}, 400, "tokens[0]: should be greater than or equal to 0"),
        ("detokenize", {"tokens": [10**9]}, 400, "token ids below"),
        ("detokenize", {"tokens": [True]}, 400, "tokens[0]: should be a valid integer"),
    ],
)
def test_what_cannot_be_tokenized_is_said(
    served: str, route: str, body: dict[str, Any], status: int, said: str
) -> None:
    reply = patient.post(f"{served}/{route}", json=body, headers={"Authorization": "Bearer secret"})
    assert (reply.status_code, said in reply.json()["error"]["message"]) == (status, True), reply.text


def test_many_clients_at_once_get_their_own_answers(client: openai.OpenAI, model: AdaptedModel) -> None:
    names = ["a", "b", "tiny"] * 5
    questions = [[{"role": "user", "content": f"number {index}"}] for index in range(len(names))]
    answers: list[str | None] = [None] * len(names)

    def ask(index: int) -> None:
        reply = client.chat.completions.create(
            model=names[index], messages=questions[index], temperature=0, max_tokens=10
        )  # type: ignore[arg-type]
        answers[index] = reply.choices[0].message.content

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(names))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    adapters = [None if name == "tiny" else name for name in names]
    assert answers == [
        model.generate([question], adapter, max_new_tokens=10)[0]
        for question, adapter in zip(questions, adapters, strict=True)
    ]


def test_seeds_choices_stops_and_logprobs(client: openai.OpenAI) -> None:
    common: Any = {"model": "a", "messages": MESSAGES, "max_tokens": 10}
    two = [client.chat.completions.create(**common, seed=5).choices[0].message.content for _ in range(2)]
    assert two[0] == two[1]

    text = client.chat.completions.create(**common, temperature=0).choices[0].message.content or ""
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    stopped = client.chat.completions.create(**common, temperature=0, stop=[stop]).choices[0]
    assert stopped.message.content == text[: text.index(stop)]
    assert stopped.finish_reason == "stop"

    several = client.chat.completions.create(**common, n=3, temperature=0, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert {choice.message.content for choice in several.choices} == {text}
    content = several.choices[0].logprobs and several.choices[0].logprobs.content
    assert content
    assert all(one.logprob == pytest.approx(one.top_logprobs[0].logprob) for one in content)  # greedy


def test_the_models_are_the_base_and_its_adapters(client: openai.OpenAI, model: AdaptedModel) -> None:
    cards = {card.id: card.model_extra or {} for card in client.models.list()}

    assert list(cards) == ["tiny", "a", "b"]
    assert cards["a"]["parent"] == "tiny"
    assert cards["tiny"]["parent"] is None
    adapter = model.adapter("a")
    assert adapter is not None
    assert client.models.retrieve("a").model_extra["root"] == adapter.identity  # type: ignore[index]


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_default_values_that_change_nothing_are_taken(served: str, route: str) -> None:
    prompt: dict[str, Any] = {"messages": MESSAGES} if route.startswith("chat") else {"prompt": "hi"}
    body = {"model": "a", "max_tokens": 4, "temperature": 0, **prompt}
    plain = patient.post(f"{served}/v1/{route}", json=body, headers=KEY).json()
    with_all = patient.post(f"{served}/v1/{route}", json=body | UNUSED | {"length_penalty": 1.0}, headers=KEY)
    assert with_all.is_success, with_all.text
    assert with_all.json()["choices"] == plain["choices"]
    stream = {"stream": True, "stream_options": {"include_obfuscation": False, "continuous_usage_stats": False}}
    assert patient.post(f"{served}/v1/{route}", json=body | stream, headers=KEY).is_success
    for name in ("length_penalty", "verbosity", "suffix"):
        refused = patient.post(f"{served}/v1/{route}", json=body | {name: "other"}, headers=KEY).json()["error"]
        assert refused["param"] == name


@pytest.mark.parametrize(
    ("change", "status", "param", "said"),
    [
        ({"model": "nobody"}, 404, "model", "there are tiny, a, b"),
        ({"response_format": "json"}, 400, "response_format", "valid dictionary"),
        ({"best_of": 3}, 400, "best_of", "best_of: not supported here"),
        ({"temperature": "hot"}, 400, "temperature", "valid number"),
        ({"temperature": -1}, 400, "temperature", "greater than or equal to 0, got -1"),
        ({"max_tokens": 10_000}, 400, "max_tokens", "at most 256 fit this base"),
        ({"max_completion_tokens": 5}, 400, "max_tokens", "not with another max_completion_tokens"),
        ({"max_tokens": None, "max_completion_tokens": 999}, 400, "max_completion_tokens", "(max_completion_tokens)"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "top_logprobs: up to 20"),
        ({"priority": 1}, 400, "priority", "priority: not supported here"),
        ({"messages": []}, 400, "messages", "at least 1 item"),
        ({"messages": [{"role": "user", "content": "hi", "verbosity": "medium"}]}, 400, "messages", "verbosity"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "part 0 is not text"),
        ({"messages": [{"role": "emperor", "content": "hi"}]}, 400, "messages", "not emperor"),
        ({"n": 0}, 400, "n", "greater than or equal to 1"),
        ({"top_logprobs": 3}, 400, "top_logprobs", "goes with logprobs"),
        ({"stop": [1]}, 400, "stop", "up to 16 texts"),
        ({"stop": ["a"] * 17}, 400, "stop", "up to 16 texts"),
        ({"stop_token_ids": [10**6], "min_tokens": 1}, 400, "stop_token_ids", "stop_token_ids: token ids below"),
        ({"stop_token_ids": [-1]}, 400, "stop_token_ids", "got -1"),
        ({"logit_bias": {"5": 10**400}}, 400, "logit_bias", "token ids to numbers"),
        (
            {"stream": True, "stream_options": {"include_usage": "yes"}},
            400,
            "stream_options",
            "include_usage: should be a valid boolean",
        ),
        ({"seed": 2**63}, 400, "seed", "less than or equal to 9223372036854775807"),
        ({"seed": -(2**63) - 1}, 400, "seed", "greater than or equal to -9223372036854775808"),
        (
            {"response_format": {"type": "json_object", "schema": {}}},
            400,
            "response_format",
            "response_format.schema: not supported here",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_would_change_the_answer_unseen_is_refused_by_name(
    served: str, change: dict[str, Any], status: int, param: str | None, said: str
) -> None:
    body = {"model": "a", "messages": MESSAGES, "max_tokens": 4} | change
    reply = patient.post(f"{served}/v1/chat/completions", json=body, headers=KEY)

    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (status, param), error
    assert said in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": [10**6]}, "prompt"),
        ("/v1/completions", {"prompt": ["hi", ""]}, "prompt"),
        ("/v1/completions", {"prompt": "hi " * 999}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "hi" * 99_999}]}, "messages"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/score", {"text_1": "", "text_2": ["c"]}, "text_1"),
        ("/rerank", {"query": "", "documents": ["c"]}, "query"),
        ("/rerank", {"query": "a", "documents": [""]}, "documents"),
    ],
)
def test_a_prompt_is_refused_by_the_name_of_its_field(served: str, path: str, body: dict[str, Any], field: str) -> None:
    reply = patient.post(f"{served}{path}", json={"model": "a", **body}, headers=KEY)

    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, field), error
    assert "prompts" not in error["message"]
    assert error["type"] == "invalid_request_error"


def test_without_a_key_only_health_and_version_answer(served: str) -> None:
    for key in ("", "Bearer wrong", "Bearer secre", "Basic secret"):
        reply = patient.get(f"{served}/v1/models", headers={"Authorization": key} if key else {})
        assert reply.status_code == 401
        assert reply.json()["error"]["code"] == "invalid_api_key"
    assert patient.get(f"{served}/health").status_code == 200
    assert patient.get(f"{served}/version").json() == {"version": lorakit.__version__}


@pytest.mark.parametrize(
    "content",
    [
        b"{", b"[1]", b'"text"', b"\xff\xfe", b"[" * 100_000, b"x" * 9_000_000,
        b'{"\\ud800": 1}', b'{"model": "\\uDFFF"}',  # half a character each
        b'{"model": "a", "messages": [{"role": "user", "content": "hi", "x": %s1%s}]}' % (b"[" * 900, b"]" * 900),
    ],
)  # fmt: skip
def test_a_hostile_body_is_a_400_or_413(served: str, content: bytes) -> None:
    headers = {"Authorization": "Bearer secret"}
    reply = patient.post(f"{served}/v1/chat/completions", content=content, headers=headers)
    assert reply.status_code == (413 if len(content) > 8_000_000 else 400)
    assert reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": "\\ud800"}', b'{"prompt": "\xed\xa0\x80"}', '{"prompt": ["\\uDFFF"]}'.encode("utf-16"),
        '{"prompt": "\ud800"}'.encode("utf-16", "surrogatepass"),
    ],
)  # fmt: skip
def test_half_a_character_is_refused_by_the_name_of_its_field(served: str, content: bytes) -> None:
    reply = patient.post(f"{served}/v1/completions", content=content, headers={"Authorization": "Bearer secret"})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "prompt")
    assert error["message"].startswith("prompt: half a character, send all of it")


def test_a_whole_character_in_two_escapes_is_text(served: str, model: AdaptedModel) -> None:
    reply = patient.post(
        f"{served}/tokenize", content=b'{"prompt": "\\ud83e\\udd17"}', headers={"Authorization": "Bearer secret"}
    )
    assert model.tokenizer.decode(reply.json()["tokens"]) == "\U0001f917"


def test_many_lists_are_not_deep_ones(served: str) -> None:
    body = {"model": "a", "prompt": ["[" * 200, *([5] for _ in range(120))], "max_tokens": 1}
    reply = patient.post(f"{served}/v1/completions", json=body, headers={"Authorization": "Bearer secret"})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (5, "messages[1].content: should be a valid string, got 5"),
        ({"text": "a"}, "messages[1].content: should be a valid string, got {'text': 'a'}"),
        ([5], "messages[1].content: part 0 is not text, {'type': 'text', 'text': ...}; got 5"),
        (
            [{"type": "text", "text": "a"}, None],
            "messages[1].content: part 1 is not text, {'type': 'text', 'text': ...}; got None",
        ),
        ([{"text": "a"}], "messages[1].content: part 0 is not text, {'type': 'text', 'text': ...}; got {'text': 'a'}"),
        (
            [{"type": "text", "text": None}],
            "messages[1].content: part 0 is not text, {'type': 'text', 'text': ...}; got {'text': None, 'type': 'text'}",
        ),
        (
            [{"type": "text", "text": ["a"]}],
            "messages[1].content: part 0 is not text, {'type': 'text', 'text': ...}; got {'text': ['a'], 'type': 'text'}",
        ),
        (["a"], "messages[1].content: part 0 is not text, {'type': 'text', 'text': ...}; got 'a'"),
        (None, "messages[1]: content: a text is required"),
    ],
)
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/tokenize"])
def test_a_part_of_a_content_that_is_no_text_is_named(served: str, content: Any, said: str, route: str) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "user", "content": content}]
    reply = patient.post(f"{served}{route}", json={"model": "a", "messages": messages}, headers=KEY)
    assert reply.status_code == 400
    assert said in reply.json()["error"]["message"]


@pytest.mark.parametrize("field", ["name", "reasoning_content", "tool_call_id"])
def test_a_field_of_a_message_that_is_a_text_is_nothing_else(served: str, field: str) -> None:
    messages = [{"role": "user", "content": "hi", field: {"a": 1}}]
    reply = patient.post(f"{served}/v1/chat/completions", json={"model": "a", "messages": messages}, headers=KEY)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")
    assert f"messages[0].{field}: should be a valid string, got {{'a': 1}}" in reply.json()["error"]["message"]


@pytest.mark.parametrize("field", ["max_tokens", "model", "x" * 50_000, "response_format"])
def test_an_error_does_not_repeat_a_long_value(served: str, field: str) -> None:
    long = {"type": "x" * 50_000} if field == "response_format" else "x" * 50_000
    body = {"model": "a", "messages": MESSAGES} | {field: long}
    reply = patient.post(f"{served}/v1/chat/completions", json=body, headers={"Authorization": "Bearer secret"})
    assert reply.status_code in (400, 404)
    assert len(reply.json()["error"]["message"]) < 2100


def test_a_wrong_method_is_told_which_ones_there_are(served: str) -> None:
    reply = patient.get(f"{served}/v1/completions", headers={"Authorization": "Bearer secret"})
    assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
    assert reply.json()["error"]["message"] == "GET /v1/completions: POST only"
    reply = patient.post(f"{served}/v1/models", headers={"Authorization": "Bearer secret"})
    assert (reply.status_code, reply.json()["error"]["message"]) == (405, "POST /v1/models: GET only")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/chat/completions", "no such route. Nearest: '/v1/chat/completions'"),
        ("/v1/v1/embeddings", "no such route. Nearest: '/v1/embeddings'"),
        ("/v1/responses", "chats are answered at /v1/chat/completions (in openai-agents OpenAIChatCompletionsModel)"),
        ("/v1/load_lora_adapter", "start the server with --admin-key KEY and --adapter-root DIR"),
        ("/v1/unload_lora_adapter", "start the server with --admin-key KEY and --adapter-root DIR"),
    ],
)
def test_a_path_that_is_no_route_is_told_where_to_go(served: str, path: str, said: str) -> None:
    reply = patient.post(served + path, headers={"Authorization": "Bearer secret"})
    assert (reply.status_code, said in reply.json()["error"]["message"]) == (404, True), reply.text


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_rows(model: AdaptedModel, stream: bool) -> None:
    body = {"model": "a", "messages": MESSAGES, "max_tokens": 240, "min_tokens": 240, "stream": stream, "n": 4}
    has_left = threading.Event()
    with (
        contextlib.closing(ServingEngine(model)) as engine,
        serving(OpenAIServer(model, engine, "tiny", log=lambda line: has_left.set()).app) as address,
        held_forwards(model) as forwards,
    ):
        client = http.client.HTTPConnection(address.removeprefix("http://"))
        client.request("POST", "/v1/chat/completions", json.dumps(body))
        wait_until(lambda: sum(engine.counts()[state] for state in ("waiting", "prefilling", "decoding")) == 4)
        if stream:
            assert b"assistant" in client.getresponse().readline()
        client.close()
        has_left.wait()
        forwards.allow(math.inf)  # the step under way ends, and no other one computes these rows
        wait_until(lambda: engine.finished.total() == 4)
        assert engine.finished["cancelled"] == 4


@pytest.fixture
def admin(base: Path, tmp_path: Path) -> Iterator[tuple[httpx.Client, Path]]:
    """A client with the admin key `root` of a server without adapters, and the folder that it may load from."""
    model = lorakit.load(base, dtype="float32")
    engine = ServingEngine(model)
    folder = tmp_path / "patches"
    for seed, name in enumerate(("one", "two")):
        make_patch(base, folder / name, seed=seed)
    app = OpenAIServer(model, engine, "tiny", ["secret"], "root", folder).app
    with serving(app) as address, patient.Client(base_url=address, headers={"Authorization": "Bearer root"}) as client:
        yield client, folder
    engine.close()


def ask(client: httpx.Client, model: str) -> Any:
    body = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
    return client.post("/v1/chat/completions", json=body, headers={"Authorization": "Bearer secret"}).json()


def test_adapters_are_loaded_replaced_and_unloaded_under_way(admin: tuple[httpx.Client, Path], base: Path) -> None:
    client, folder = admin
    python = lorakit.load(base, {name: folder / name for name in ("one", "two")}, dtype="float32")
    expected = {name: python.generate([MESSAGES], name, max_new_tokens=8)[0] for name in ("one", "two")}

    def answered() -> str:
        return str(ask(client, "x")["choices"][0]["message"]["content"])

    load = {"lora_name": "x", "lora_path": "one"}
    assert client.post("/v1/load_lora_adapter", json=load).text == "Success: LoRA adapter 'x' added successfully."
    assert answered() == expected["one"]
    again = client.post("/v1/load_lora_adapter", json=load | {"lora_path": "two"})
    error = again.json()["error"]
    assert (again.status_code, "is taken" in error["message"], error["param"]) == (400, True, "lora_name")
    assert answered() == expected["one"]
    assert (
        client.post("/v1/load_lora_adapter", json=load | {"lora_path": "two", "load_inplace": True}).status_code == 200
    )
    assert answered() == expected["two"]
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "x"}).status_code == 200
    assert ask(client, "x")["error"]["code"] == "model_not_found"
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "x"}).status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"lora_name": "x", "lora_path": "../secret"}, 403, "outside"),
        ({"lora_name": "x", "lora_path": "/etc"}, 403, "outside"),
        ({"lora_name": "x", "lora_path": "link"}, 403, "outside"),
        ({"lora_name": "x", "lora_path": "\u0000"}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": "nowhere"}, 400, "no such folder"),
        ({"lora_name": "x", "lora_path": "cut"}, 400, "adapter_model.safetensors"),
        ({"lora_name": "tiny", "lora_path": "one"}, 400, "lora_name: is the base's name"),
        ({"lora_name": "", "lora_path": "two"}, 400, "lora_name: a name has"),
        ({"lora_name": " ", "lora_path": "two"}, 400, "lora_name: a name has"),
        ({"lora_name": "x"}, 400, "lora_path: is required"),
        ({"lora_name": "x", "lora_path": "one", "is_3d_lora_weight": True}, 400, "is_3d_lora_weight: not supported"),
    ],
    ids=lambda value: str(value.get("lora_path", "none")) if isinstance(value, dict) else "",
)
def test_nothing_outside_of_the_root_and_nothing_damaged_is_loaded(
    admin: tuple[httpx.Client, Path], body: dict[str, Any], status: int, said: str
) -> None:
    client, folder = admin
    make = folder.parent / "secret"
    (folder / "one").rename(make)
    (folder / "link").symlink_to(make)
    make_cut = folder / "cut"
    make_cut.mkdir()
    for file in make.iterdir():
        (make_cut / file.name).write_bytes(
            file.read_bytes()[:200] if file.suffix == ".safetensors" else file.read_bytes()
        )

    reply = client.post("/v1/load_lora_adapter", json=body)

    error = reply.json()["error"]
    assert (reply.status_code, said in error["message"]) == (status, True), reply.text
    assert error["param"] in {*body, "lora_path"}
    assert [
        card["id"] for card in client.get("/v1/models", headers={"Authorization": "Bearer secret"}).json()["data"]
    ] == ["tiny"]


def test_only_the_admin_key_changes_adapters(admin: tuple[httpx.Client, Path], served: str) -> None:
    client, _ = admin
    for path in ("/v1/models", "/v1/adapters"):  # so that who changes them may see them
        assert client.get(path).status_code == 200
        assert client.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
    for key in ("Bearer secret", "Bearer wrong", ""):
        for route in ("load", "unload"):
            reply = client.post(f"/v1/{route}_lora_adapter", json={}, headers={"Authorization": key})
            assert reply.status_code == 401
    # a server without an admin key has no such routes
    reply = patient.post(f"{served}/v1/load_lora_adapter", json={}, headers={"Authorization": "Bearer secret"})
    assert reply.status_code == 404


@pytest.mark.parametrize("number", [0, 5, 20])
def test_no_log_probability_of_a_text_is_lost(client: openai.OpenAI, number: int) -> None:
    for prompt in ("hi", "\u4e2d\u6587", "x"):
        answer = client.completions.create(model="tiny", prompt=prompt, logprobs=number, max_tokens=12, seed=3)
        logprobs: Any = answer.choices[0].logprobs
        for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
            assert number <= len(top) <= number + 1 or number == 0
            assert len(top) >= 1
            assert value in top.values()
            assert token in top
