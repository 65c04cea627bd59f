"""Answers in a form, and tokens to text and back."""

import json
import re
from typing import Any

from conformance.case import LLAMA, VLLM, Case, case
from conformance.server import CHAT, MESSAGES, QUESTION, Server

CASES: list[Case] = []
CHATS = "openai/chat_completion/test_chat.py"
TOKENIZE = "serve/tokenize/test_tokenization.py"
SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "count": {"type": "integer", "maximum": 9}},
    "required": ["name", "count"], "additionalProperties": False,
}  # fmt: skip


@case(CASES, VLLM, f"{CHATS}: test_response_format_json_object")
def a_json_object_is_one(server: Server) -> None:
    content = server.content(model="json", response_format={"type": "json_object"}, max_tokens=100)
    assert isinstance(json.loads(content), dict)


@case(CASES, VLLM, f"{CHATS}: test_response_format_json_schema")
def a_schema_is_obeyed_by_a_model_that_would_not(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "order", "schema": SCHEMA, "strict": True}}
    for seed in range(3):
        order = json.loads(server.content(response_format=form, max_tokens=100, temperature=1.0, seed=seed))
        assert (set(order), type(order["count"])) == ({"name", "count"}, int)


@case(CASES, LLAMA, "test_chat_completion.py: test_completion_with_response_format")
def a_schema_of_one_value_gives_it(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"const": "foooooo"}}}
    assert server.content(response_format=form, max_tokens=20) == '"foooooo"'


@case(CASES, VLLM, f"{CHATS}: test_response_format_text")
def the_form_text_is_no_form(server: Server) -> None:
    assert server.content(response_format={"type": "text"}) == server.content()


@case(CASES, VLLM, f"{CHATS}: test_structured_outputs_regex_chat", note="as `response_format: {type: regex}`")
def an_expression_is_obeyed(server: Server) -> None:
    pattern = r"((25[0-5]|(2[0-4]|1\d|[1-9]|)\d)\.){3}(25[0-5]|(2[0-4]|1\d|[1-9]|)\d)"
    content = server.content(response_format={"type": "regex", "pattern": pattern}, max_tokens=40)
    assert re.fullmatch(pattern, content)


@case(CASES, VLLM, f"{CHATS}: test_structured_outputs_choice_chat", note="as an expression or an `enum`")
def one_of_some_words_is_answered(server: Server) -> None:
    for seed in range(4):
        form = {"type": "regex", "pattern": "Python|Rust|C"}
        assert server.content(response_format=form, temperature=1.0, seed=seed) in ("Python", "Rust", "C")


@case(CASES, VLLM, f"{TOKENIZE}: test_tokenize_completions")
def the_tokens_of_a_text_are_those_of_its_completion(server: Server) -> None:
    for special in (False, True):
        reply = server.http.post(
            "/tokenize", json={"model": "json", "prompt": QUESTION, "add_special_tokens": special}
        ).json()
        assert set(reply) == {"count", "max_model_len", "tokens", "token_strs"}
        assert (reply["count"], reply["max_model_len"], reply["token_strs"]) == (len(reply["tokens"]), 1024, None)
    assert server.ask("/v1/completions")["usage"]["prompt_tokens"] == reply["count"]


@case(CASES, VLLM, f"{TOKENIZE}: test_tokenize_chat")
def the_tokens_of_messages_are_those_of_their_chat(server: Server) -> None:
    turns = [*MESSAGES, {"role": "assistant", "content": "Nice!"}, MESSAGES[0]]
    full, bare = (
        server.http.post("/tokenize", json={"messages": turns, "add_generation_prompt": prompt}).json()["tokens"]
        for prompt in (True, False)
    )
    assert full[: len(bare)] == bare != full
    assert server.ask(CHAT, messages=turns)["usage"]["prompt_tokens"] == len(full)


@case(CASES, VLLM, f"{TOKENIZE}: test_tokenize_with_return_token_strs")
def the_tokenizers_own_strings_are_given(server: Server) -> None:
    reply = server.http.post("/tokenize", json={"prompt": QUESTION, "return_token_strs": True}).json()
    assert len(reply["token_strs"]) == reply["count"]
    assert all(isinstance(text, str) for text in reply["token_strs"])


@case(CASES, VLLM, f"{TOKENIZE}: test_detokenize")
def ids_give_their_text_back(server: Server) -> None:
    reply = server.http.post("/detokenize", json={"model": "tiny", "tokens": server.tokens(QUESTION)})
    assert reply.json() == {"prompt": QUESTION}


@case(CASES, LLAMA, "test_tokenize.py: test_tokenize_with_pieces", note="the text comes back from ids, without pieces")
def any_text_comes_back_from_its_tokens(server: Server) -> None:
    text = "unicode \u5abd and emoji \U0001f917\n"
    assert server.http.post("/detokenize", json={"tokens": server.tokens(text)}).json() == {"prompt": text}
