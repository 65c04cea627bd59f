"""Requests that are refused: those that other servers refuse too, and those that only this one refuses, and why."""

from typing import Any, Final

from conformance.case import LLAMA, VLLM, Case, Request, errors, refusals
from conformance.server import ADMIN, CHAT, TEXT

CHATS: Final = "openai/chat_completion/test_chat.py"
TEXTS: Final = "openai/completion/test_completion.py"
LLAMA_CHATS: Final = "test_chat_completion.py"
LLAMA_TEXTS: Final = "test_completion.py"
BIAS: Final = "openai/chat_completion/test_chat_logit_bias_validation.py"
STOPS: Final = "openai/chat_completion/test_chat_stop_token_ids_validation.py"
LORA: Final = "serve/lora/test_lora_adapters.py"
SERVING: Final = "serve/lora/test_serving_models.py"
LOAD: Final = "/v1/load_lora_adapter"
UNLOAD: Final = "/v1/unload_lora_adapter"
BAD_SCHEMA: Final = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {"foo": "bar"}}}}

BAD_MESSAGES: Final[dict[str, Any]] = {
    "null": None, "a text": "string", "numbers": [123], "empty objects": [{}], "a role of 123": [{"role": 123}],
    "a content of 123": [{"role": "system", "content": 123}],
    "one good and one empty": [{"role": "system", "content": "test"}, {}],
}  # fmt: skip


def chat(names: str, status: int = 400, **fields: Any) -> Request:
    return Request(CHAT, fields, status, names)


def text(names: str, status: int = 400, **fields: Any) -> Request:
    return Request(TEXT, fields, status, names)


def admin(path: str, names: str, status: int = 400, **fields: Any) -> Request:
    return Request(path, fields, status, names, headers=ADMIN)


def messages(content: Any) -> Request:
    return chat("messages", messages=content)


def no_route(path: str, method: str = "POST") -> Request:
    return Request(path, {}, 404, "no such route", method)


BOTH: Final[list[Case]] = [
    *errors(VLLM, [
        ("a seed above 64 bits", f"{CHATS}: test_long_seed", chat("seed", seed=2**63)),
        ("a seed below 64 bits", f"{CHATS}: test_long_seed", chat("seed", seed=-(2**63) - 1)),
        ("stream options without a stream", f"{CHATS}: test_chat_completion_stream_options",
         chat("stream_options", stream_options={"include_usage": True})),
        ("more logprobs than there are tokens", f"{TEXTS}: test_too_many_completion_logprobs", text("logprobs", logprobs=3201)),
        ("a number of logprobs below 0", f"{TEXTS}: test_prompt_logprobs_completion", text("logprobs", logprobs=-1)),
        ("a schema that is none", f"{TEXTS}: test_invalid_json_schema", text("response_format", response_format=BAD_SCHEMA)),
        ("a schema that is none, in a chat", "openai/chat_completion/test_chat_completion.py: test_invalid_json_schema",
         chat("response_format", response_format=BAD_SCHEMA)),
        ("an expression that is none", f"{TEXTS}: test_invalid_regex",
         text("response_format", response_format={"type": "regex", "pattern": "[.*"})),
        ("an expression that is no text", f"{CHATS}: test_structured_outputs_type_error",
         chat("response_format", response_format={"type": "regex", "pattern": {"1": "Python"}})),
        ("a json_schema without a schema", "openai/chat_completion/test_chat_error.py: test_json_schema_response_format_missing_schema",
         chat("json_schema", response_format={"type": "json_schema"})),
        ("a json_schema without a schema, in a text", "openai/completion/test_completion_error.py: test_json_schema_response_format_missing_schema",
         text("json_schema", response_format={"type": "json_schema"})),
        ("a negative token id", "openai/completion/test_completion_error.py: test_negative_prompt_token_ids_flat", text("-1", prompt=[-1])),
        ("a negative token id in a list", "openai/completion/test_completion_error.py: test_negative_prompt_token_ids_nested",
         text("-1", prompt=[[-1]])),
        ("a token id that the base has not", "openai/completion/test_prompt_validation.py: test_out_of_vocab_token_ids",
         text("999999", prompt=[999999])),
        ("no prompt", "openai/completion/test_prompt_validation.py: test_empty_prompt", text("prompt", prompt=None)),
        ("an empty list of prompts", "openai/completion/test_empty_prompt_list.py: test_empty_prompt_list_rejected", text("prompt", prompt=[])),
        ("a bias of a token that the base has not", f"{BIAS}: test_chat_logit_bias_invalid", chat("3200", logit_bias={"3201": 1.0})),
        ("a bias of something that is no token", f"{BIAS}: test_chat_logit_bias_non_integer_key", chat("logit_bias", logit_bias={"a": 50})),
        ("a bias that is no number", f"{BIAS}: test_chat_logit_bias_non_numeric_value", chat("logit_bias", logit_bias={"1": "much"})),
        ("a stop token that the base has not", f"{STOPS}: test_chat_stop_token_ids_out_of_vocab", chat("3201", stop_token_ids=[3201])),
        ("a negative stop token", f"{STOPS}: test_chat_stop_token_ids_negative", chat("-1", stop_token_ids=[-1])),
        ("an unknown tool_choice", "openai/chat_completion/test_tool_choice_null.py: test_invalid_tool_choice_is_still_rejected",
         chat("tool_choice", tool_choice="bogus")),
        ("unloading an adapter that is not there", f"{SERVING}: test_unload_lora_adapter_not_found",
         admin(UNLOAD, "'nobody' is not loaded", 404, lora_name="nobody")),
        ("unloading without a name", f"{SERVING}: test_unload_lora_adapter_missing_fields", admin(UNLOAD, "lora_name")),
        ("loading under a name that is taken", f"{SERVING}: test_load_lora_adapter_duplicate",
         admin(LOAD, "is taken", lora_name="json", lora_path="json")),
        ("loading files that are damaged", f"{LORA}: test_dynamic_lora_invalid_files",
         admin(LOAD, "adapter_config.json", lora_name="x", lora_path="damaged")),
    ]),
    *errors(LLAMA, [
        *(
            (f"messages that are {what}", f"{LLAMA_CHATS}: test_invalid_chat_completion_req", messages(content))
            for what, content in BAD_MESSAGES.items()
        ),
        ("a response_format of another type", f"{LLAMA_CHATS}: test_completion_with_response_format",
         chat("response_format", response_format={"type": "sound"})),
        ("a prompt longer than the base", f"{LLAMA_TEXTS}: test_nocache_long_input_prompt", text("at most 1024", prompt="life is " * 2000)),
        ("a chat longer than the base", f"{LLAMA_CHATS}: test_context_size_exceeded",
         chat("at most 1024", messages=[{"role": "user", "content": "What is the best book"}] * 300)),
        ("an image", "test_security.py: test_local_media_file",
         chat("not text", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file://x"}}]}])),
    ]),
]  # fmt: skip
"""that both servers refuse"""

ECHO: Final = "log-probabilities of prompts are those of `echo` with `logprobs`"
FORM: Final = "OpenAI's `response_format` says it"
TEMPLATE: Final = "a chat is what the base's template makes of it, as in training"
NEVER_CUT: Final = "a prompt that does not fit is refused, never cut"
NO_BEAMS: Final = "no search by beams; `n` samples"

HERE: Final[list[Case]] = [
    *refusals(VLLM, [
        ("log-probabilities of a chat's prompt", f"{CHATS}: test_prompt_logprobs_chat", chat("prompt_logprobs", prompt_logprobs=1), ECHO),
        ("log-probabilities of a text's prompt", f"{TEXTS}: test_prompt_logprobs_completion", text("prompt_logprobs", prompt_logprobs=0), ECHO),
        ("a role that the template does not know", f"{CHATS}: test_custom_role",
         chat("roles", messages=[{"role": "my-custom-role", "content": "hi"}]), "the built-in base's template refuses it"),
        ("a choice of words", f"{CHATS}: test_structured_outputs_choice_chat",
         chat("structured_outputs", structured_outputs={"choice": ["a", "b"]}), FORM),
        ("a schema in structured_outputs", f"{CHATS}: test_structured_outputs_json_chat",
         chat("structured_outputs", structured_outputs={"json": {}}), FORM),
        ("a grammar", "openai/chat_completion/test_chat_completion.py: test_invalid_grammar",
         chat("structured_outputs", structured_outputs={"grammar": ""}), "schemas and expressions only"),
        ("usage in every chunk", f"{TEXTS}: test_completion_stream_options",
         text("stream_options", stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}),
         "OpenAI's streams have usage once"),
        ("a stop after some characters", f"{CHATS}: test_chat_completion_stream_options", chat("min_characters", min_characters=10),
         "`min_tokens` says it in tokens"),
        ("SageMaker's route", f"{CHATS}: test_invocations", no_route("/invocations"), "OpenAI's routes only"),
        ("a prompt that is cut", f"{TEXTS}: test_completion_truncation_side_controls_prompt_truncation",
         text("truncate_prompt_tokens", truncate_prompt_tokens=4), NEVER_CUT),
        ("a chat that is cut", "openai/chat_completion/test_chat_completion.py: test_chat_completion_truncation_side_controls_prompt_truncation",
         chat("truncat", truncate_prompt_tokens=4, truncation_side="left"), NEVER_CUT),
        ("beams", f"{TEXTS}: test_batch_completions", text("use_beam_search", use_beam_search=True), NO_BEAMS),
        ("beams of an adapter", f"{LORA}: test_beam_search_with_lora_adapters", text("use_beam_search", model="json", use_beam_search=True),
         NO_BEAMS),
        ("token ids in the answer", "openai/basic/test_return_token_ids.py: test_basic_completion_with_emoji",
         text("return_token_ids", return_token_ids=True), "OpenAI's replies have texts"),
        ("tokens named by their ids", "openai/basic/test_return_token_ids.py: test_comparison_with_prompt_logprobs_and_logprobs",
         text("return_tokens_as_token_ids", return_tokens_as_token_ids=True), "OpenAI's replies have texts"),
        ("an answer that goes on with a message", "openai/chat_completion/test_chat_echo.py: test_chat_session_with_echo_and_continue_final_message",
         chat("continue_final_message", continue_final_message=True), TEMPLATE),
        ("a field of a message that the template does not show", f"{CHATS}: test_extra_fields_allowed",
         chat("extra_field", messages=[{"role": "user", "content": "hi", "extra_field": "0"}]), TEMPLATE),
        ("an echo of a chat", "openai/chat_completion/test_chat_echo.py: test_chat_session_with_echo_and_continue_final_message",
         chat("echo", echo=True), "`echo` is of texts, as OpenAI's"),
        ("a template of the request", "openai/chat_completion/test_chat_echo.py: test_chat_session_with_echo_and_continue_final_message",
         chat("add_generation_prompt", add_generation_prompt=False), TEMPLATE),
        ("prompts as embeddings", "openai/completion/test_prompt_validation.py: test_empty_prompt", text("prompt_embeds", prompt_embeds=["AA"]),
         "tensors of a request are not read"),
        ("a salt of the prefix cache", "openai/chat_completion/test_non_object_body_validation.py: test_chat_completion_request_cache_salt_still_validated_on_dict",
         chat("cache_salt", cache_salt="a"), "the cache is shared by all clients"),
        ("an answer without an end token", "openai/completion/test_prompt_validation.py: test_inline_hidden_states_with_concurrent_streaming",
         text("ignore_eos", ignore_eos=True), "`min_tokens` says how far"),
        ("facts about the tokenizer", "serve/tokenize/test_tokenization.py: test_tokenizer_info_basic", no_route("/tokenizer_info", "GET"),
         "the base's folder has them"),
        ("a message that goes on, in tokens", "serve/tokenize/test_tokenization.py: test_tokenize_chat",
         Request("/tokenize", {"messages": [{"role": "user", "content": "a"}], "continue_final_message": True}, 400, "continue_final_message"),
         TEMPLATE),
        ("loading a path that is not there", f"{LORA}: test_dynamic_lora_not_found", admin(LOAD, "no such folder", lora_name="x", lora_path="none"),
         "400, not 404: the route is there, its field is wrong"),
        ("loading from outside the folder of patches", f"{LORA}: test_dynamic_lora_not_found",
         admin(LOAD, "outside", 403, lora_name="x", lora_path="/not/an/adapter"), "only patches below --adapter-root are read"),
        ("the server's load", "serve/instrumentator/test_basic.py: test_server_load", no_route("/load", "GET"), "`/metrics` has it"),
    ]),
    *refusals(LLAMA, [
        ("no model", f"{LLAMA_CHATS}: test_chat_completion", chat("model", model=None), "a server of adapters does not guess which one"),
        ("a model that is not there", f"{LLAMA_TEXTS}: test_completion_with_openai_library", text("is not here", 404, model="davinci-002"),
         "a server of adapters does not guess which one"),
        ("a schema in json_object", f"{LLAMA_CHATS}: test_completion_with_response_format",
         chat("schema", response_format={"type": "json_object", "schema": {"const": "42"}}), "`json_schema` says it; it is not ignored"),
        ("a schema beside the messages", f"{LLAMA_CHATS}: test_completion_with_json_schema", chat("json_schema", json_schema={"const": "42"}), FORM),
        ("a grammar in GBNF", f"{LLAMA_CHATS}: test_completion_with_grammar", chat("grammar", grammar='root ::= "a"'), "schemas and expressions only"),
        ("times of each token", f"{LLAMA_CHATS}: test_chat_completion_with_timings_per_token", chat("timings_per_token", timings_per_token=True),
         "`/metrics` and the log have times"),
        ("progress of the prompt", f"{LLAMA_CHATS}: test_return_progress", chat("return_progress", return_progress=True), "OpenAI's streams have none"),
        ("its own fields of a completion", f"{LLAMA_TEXTS}: test_completion", text("n_predict", n_predict=8), "OpenAI's names only: `max_tokens`"),
        ("its own route of completions", f"{LLAMA_TEXTS}: test_completion", no_route("/completion"), "OpenAI's routes only"),
        ("routes without /v1", f"{LLAMA_CHATS}: test_chat_completion", no_route("/chat/completions"), "OpenAI's routes only"),
        ("texts and ids in one prompt", f"{LLAMA_TEXTS}: test_completion_with_tokens_input", text("prompt", prompt=[5, 6, "hello", 7]),
         "a prompt is a text or token ids, as OpenAI's"),
        ("a choice of the reply's fields", f"{LLAMA_TEXTS}: test_completion_response_fields", text("response_fields", response_fields=["content"]),
         "OpenAI's replies have all"),
        ("a number of probabilities", f"{LLAMA_TEXTS}: test_n_probs", text("n_probs", n_probs=10), "OpenAI's `logprobs` says it"),
        ("a prompt past the cache", f"{LLAMA_TEXTS}: test_cache_vs_nocache_prompt", text("cache_prompt", cache_prompt=False),
         "a cached prefix does not change an answer"),
        ("a bias of texts", f"{LLAMA_TEXTS}: test_logit_bias", text("logit_bias", logit_bias={" the ": -100}), "a bias is of token ids, as OpenAI's"),
        ("the end token suppressed", "test_ignore_eos.py: test_ignore_eos_populates_logit_bias", text("ignore_eos", ignore_eos=True),
         "`min_tokens` says how far"),
        ("content to tokenize", "test_tokenize.py: test_tokenize_detokenize", Request("/tokenize", {"content": "What is"}, 400, "content"),
         "vLLM's names: `prompt`"),
        ("weights of adapters in a request", "test_lora.py: test_lora_per_request", text("lora", lora=[{"id": 0, "scale": 0.5}]),
         "`model` names one adapter; `lorakit merge --as-patch` makes a sum of several"),
        ("weights of adapters of the server", "test_lora.py: test_lora", no_route("/lora-adapters"), "requests choose, not the server"),
        ("slots", "test_basic.py: test_server_slots", no_route("/slots", "GET"), "`/metrics` and `/v1/adapters` say what runs"),
        ("properties", "test_basic.py: test_server_props", no_route("/props", "GET"), "`/v1/models` says them"),
        ("a key in Anthropic's header", "test_security.py: test_correct_api_key_anthropic_header",
         Request("/v1/models", {}, 401, "Authorization: Bearer KEY", "GET", (("Authorization", ""), ("X-Api-Key", "secret"))), "one header for keys"),
        ("a page of another origin", "test_security.py: test_cors_options",
         Request(TEXT, {}, 405, "POST only", "OPTIONS", (("Origin", "web.mydomain.fr"),)), "no page but its own is let in"),
        ("embeddings of a base that was not made for them", "test_embedding.py: test_embedding_single",
         Request("/v1/embeddings", {"model": "tiny", "input": "a text"}, 400, "this base has no embeddings"),
         "a base's folder says how they are pooled, or there are none"),
        ("ranks of documents by a base that was not made for them", "test_rerank.py: test_rerank",
         Request("/v1/rerank", {"model": "tiny", "query": "a", "documents": ["b", "c"]}, 400, "this base has no embeddings"),
         "an adapter's head ranks them, or its embeddings"),
        ("text between two others", "test_infill.py: test_infill_without_input_extra", no_route("/infill"), "causal language models only"),
        ("OpenAI's responses", "test_compat_oai_responses.py: test_responses_with_openai_library", no_route("/v1/responses"),
         "no conversations are stored"),
        ("Anthropic's messages", "test_compat_anthropic.py: test_anthropic_messages_basic", no_route("/v1/messages"), "OpenAI's routes only"),
    ]),
]  # fmt: skip
"""that this server refuses on purpose"""

CASES: Final = [*BOTH, *HERE]
