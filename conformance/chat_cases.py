"""Chats: their form, their streams, choices and log-probabilities."""

import json
from typing import Any

import pytest

from conformance.case import LLAMA, VLLM, Case, case
from conformance.server import BASE, CHAT, MESSAGES, QUESTION, Server

CASES: list[Case] = []
CHATS = "openai/chat_completion/test_chat.py"
LLAMA_CHATS = "test_chat_completion.py"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@case(CASES, VLLM, f"{CHATS}: test_single_chat_session")
def a_chat_has_one_choice_of_the_assistant_and_usage_adds_up(server: Server) -> None:
    first = server.openai.chat.completions.create(model=BASE, messages=MESSAGES, max_completion_tokens=5)  # type: ignore[arg-type]
    (choice,) = first.choices
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert first.id.startswith("chatcmpl-")
    assert first.usage is not None
    assert first.usage.completion_tokens == 5
    assert first.usage.total_tokens == first.usage.prompt_tokens + 5
    turns = [*MESSAGES, {"role": "assistant", "content": choice.message.content}, MESSAGES[0]]
    later = server.ask(CHAT, messages=turns)
    assert later["usage"]["prompt_tokens"] > first.usage.prompt_tokens


@case(CASES, VLLM, f"{CHATS}: test_complex_message_content")
def parts_of_text_are_a_text(server: Server) -> None:
    parts = [{"type": "text", "text": QUESTION[:10]}, {"type": "text", "text": QUESTION[10:]}]
    assert server.content(messages=[{"role": "user", "content": parts}]) == server.content()


@case(CASES, VLLM, "openai/chat_completion/test_chat_error.py: test_system_message_accepts_text_array")
def a_system_message_may_be_parts_of_text(server: Server) -> None:
    text, parts = (
        [{"role": "system", "content": content}, *MESSAGES] for content in ("Hi", [{"type": "text", "text": "Hi"}])
    )
    assert server.content(messages=text) == server.content(messages=parts)


@case(CASES, VLLM, f"{CHATS}: test_chat_streaming")
def a_stream_is_the_answer_in_pieces_and_finishes_once(server: Server) -> None:
    for model in (BASE, "json"):
        full = server.ask(CHAT, model=model, max_tokens=10)["choices"][0]
        chunks = server.stream(CHAT, model=model, max_tokens=10)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert "".join(delta.get("content", "") for delta in deltas) == full["message"]["content"]
        assert [reason for reason in reasons if reason] == [full["finish_reason"]] == reasons[-1:]


@case(CASES, LLAMA, f"{LLAMA_CHATS}: test_chat_completion_stream", note="the first delta's content is an empty text")
def the_role_comes_first_and_once_and_all_chunks_have_one_id(server: Server) -> None:
    chunks = server.stream(CHAT)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert not any("role" in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    assert len({(chunk["id"], chunk["model"], chunk["created"]) for chunk in chunks}) == 1


@case(CASES, VLLM, f"{CHATS}: test_chat_completion_stream_options")
def usage_is_in_a_last_chunk_without_choices_if_it_is_wanted(server: Server) -> None:
    assert not any(chunk.get("usage") for chunk in server.stream(CHAT, stream_options={"include_usage": False}))
    assert not any(chunk.get("usage") for chunk in server.stream(CHAT, stream_options={}))
    *others, last = server.stream(CHAT, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in others)
    assert last["choices"] == []
    usage = last["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == 8


@case(CASES, LLAMA, f"{LLAMA_CHATS}: test_chat_completion_with_openai_library")
def the_openai_client_reads_a_chat(server: Server) -> None:
    reply = server.openai.chat.completions.create(model="json", messages=MESSAGES, max_tokens=60, temperature=0)  # type: ignore[arg-type]
    assert reply.choices[0].finish_reason == "stop"
    assert json.loads(reply.choices[0].message.content or "")["count"] == 3


@case(CASES, VLLM, f"{CHATS}: test_chat_completion_n_parameter_non_streaming")
def n_choices_have_their_indices_and_differ(server: Server) -> None:
    choices = server.ask(CHAT, n=3, temperature=1.5, max_tokens=20, seed=3)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in choices}) > 1


@case(CASES, VLLM, f"{CHATS}: test_chat_completion_n_parameter_streaming")
def n_choices_are_streamed_with_their_indices(server: Server) -> None:
    texts = {0: "", 1: ""}
    for chunk in server.stream(CHAT, n=2, seed=3, temperature=1.5, max_tokens=15):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    full = server.ask(CHAT, n=2, seed=3, temperature=1.5, max_tokens=15)["choices"]
    assert [texts[0], texts[1]] == [choice["message"]["content"] for choice in full]


@case(CASES, VLLM, f"{CHATS}: test_chat_completion_n_with_seed")
def n_choices_of_a_seed_are_the_same_again(server: Server) -> None:
    first, second = (server.ask(CHAT, n=2, seed=42, temperature=0.8)["choices"] for _ in range(2))
    assert first == second


@case(CASES, LLAMA, f"{LLAMA_CHATS}: test_chat_completions_multiple_choices")
def every_choice_has_role_and_reason(server: Server) -> None:
    for choice in server.ask(CHAT, n=2)["choices"]:
        assert (choice["message"]["role"], choice["finish_reason"]) == ("assistant", "length")


@case(CASES, VLLM, f"{CHATS}: test_no_logprobs_chat")
def without_logprobs_there_are_none(server: Server) -> None:
    assert server.ask(CHAT, logprobs=False)["choices"][0]["logprobs"] is None


@case(CASES, VLLM, f"{CHATS}: test_zero_logprobs_chat")
def no_top_logprobs_leave_those_of_the_tokens(server: Server) -> None:
    content = server.ask(CHAT, logprobs=True, top_logprobs=0)["choices"][0]["logprobs"]["content"]
    assert len(content) == 8
    assert all(one["top_logprobs"] == [] and one["logprob"] <= 0 for one in content)


@case(CASES, VLLM, f"{CHATS}: test_some_logprobs_chat")
def as_many_top_logprobs_as_are_wanted_the_best_first(server: Server) -> None:
    for one in server.ask(CHAT, model="json", logprobs=True, top_logprobs=5)["choices"][0]["logprobs"]["content"]:
        values = [top["logprob"] for top in one["top_logprobs"]]
        assert len(values) == 5
        assert values == sorted(values, reverse=True)
        assert one["logprob"] == pytest.approx(values[0])  # greedy


@case(
    CASES, VLLM, f"{CHATS}: test_too_many_chat_logprobs",
    note="with `--max-logprobs`, without which 20 are the limit",
)  # fmt: skip
def more_top_logprobs_than_there_are_tokens_are_refused_and_the_server_goes_on(server: Server) -> None:
    for stream in (True, False):
        body = server.body(CHAT) | {"logprobs": True, "top_logprobs": 3201, "stream": stream}
        assert server.http.post(CHAT, json=body).status_code == 400
    (first, *_) = server.ask(CHAT, logprobs=True, top_logprobs=30)["choices"][0]["logprobs"]["content"]
    assert len(first["top_logprobs"]) == 30


@case(CASES, VLLM, "openai/chat_completion/test_chat_echo.py: test_top_logprobs", note="as 3200, not as -1")
def all_tokens_of_the_vocabulary_may_be_reported(server: Server) -> None:
    (first,) = server.ask(CHAT, logprobs=True, top_logprobs=3200, max_tokens=1)["choices"][0]["logprobs"]["content"]
    assert len(first["top_logprobs"]) == 3200


@case(CASES, LLAMA, f"{LLAMA_CHATS}: test_logprobs")
def the_tokens_of_logprobs_are_the_content(server: Server) -> None:
    reply = server.openai.chat.completions.create(
        model="json", messages=MESSAGES, max_tokens=60, temperature=0, logprobs=True, top_logprobs=10,  # type: ignore[arg-type]
    )  # fmt: skip
    (choice,) = reply.choices
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert "".join(one.token for one in content) == choice.message.content
    assert all(one.bytes == list(one.token.encode()) and len(one.top_logprobs) == 10 for one in content)


@case(CASES, LLAMA, f"{LLAMA_CHATS}: test_logprobs_stream")
def the_tokens_of_streamed_logprobs_are_the_content(server: Server) -> None:
    choices = [chunk["choices"][0] for chunk in server.stream(CHAT, logprobs=True, top_logprobs=10)]
    tokens = [one for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]]
    assert len(tokens) == 8
    assert "".join(one["token"] for one in tokens) == "".join(choice["delta"].get("content", "") for choice in choices)


@case(CASES, VLLM, f"{CHATS}: test_structured_outputs_choice_chat_logprobs")
def a_token_that_cannot_come_has_a_finite_logprob(server: Server) -> None:
    form = {"type": "regex", "pattern": "yes|no"}
    for stream in (False, True):
        fields = {"response_format": form, "logprobs": True, "top_logprobs": 50, "max_tokens": 5}
        replies = server.stream(CHAT, **fields) if stream else [server.ask(CHAT, **fields)]
        choices = [reply["choices"][0] for reply in replies if reply["choices"][0]["logprobs"]]
        tops = [
            top["logprob"] for choice in choices for one in choice["logprobs"]["content"] for top in one["top_logprobs"]
        ]
        assert min(tops) == -9999.0


@case(
    CASES,
    VLLM,
    "openai/chat_completion/test_tool_choice_null.py: test_null_tool_choice_defaults_to_auto_like_an_absent_one",
)
def null_is_as_if_the_field_were_not_there(server: Server) -> None:
    plain = server.content(tools=[TOOL])
    assert server.content(tools=[TOOL], tool_choice=None, n=None, stop=None, seed=None, logprobs=None) == plain


@case(CASES, VLLM, "openai/basic/test_return_token_ids.py: test_chat_completion_with_tool_use")
def tool_choice_auto_is_the_default(server: Server) -> None:
    assert server.content(tools=[TOOL], tool_choice="auto") == server.content(tools=[TOOL])


@case(CASES, LLAMA, "test_tool_call.py: test_completion_with_required_tool_real_model")
def tool_choice_required_is_refused_where_the_template_shows_no_calls(server: Server) -> None:
    body = {**server.body(CHAT), "tools": [TOOL], "tool_choice": "required"}
    assert server.http.post(CHAT, json=body).json()["error"]["param"] == "tool_choice"


@case(CASES, VLLM, "serve/tokenize/test_tokenization.py: test_tokenize_chat_with_tools")
def tools_are_shown_to_the_model_by_the_template(server: Server) -> None:
    ids = server.http.post("/tokenize", json={"messages": MESSAGES, "tools": [TOOL]}).json()["tokens"]
    assert "get_weather" in server.http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert server.ask(CHAT, tools=[TOOL])["usage"]["prompt_tokens"] == len(ids)


@case(CASES, LLAMA, "test_tool_call.py: test_completion_without_tool_call_fast")
def an_answer_that_calls_no_tool_has_no_tool_calls(server: Server) -> None:
    for tools in ([], [TOOL]):
        assert server.ask(CHAT, tools=tools)["choices"][0]["message"].get("tool_calls") is None


@case(CASES, LLAMA, f"{LLAMA_CHATS}: test_context_size_exceeded_stream")
def a_prompt_that_does_not_fit_is_refused_before_a_stream_begins(server: Server) -> None:
    for stream in (True, False):
        body = server.body(CHAT) | {"messages": MESSAGES * 200, "stream": stream}
        reply = server.http.post(CHAT, json=body)
        assert (reply.status_code, reply.headers["content-type"]) == (400, "application/json")
        assert "at most 1024 fit" in reply.json()["error"]["message"]
