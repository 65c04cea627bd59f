"""Completions of texts and token ids: batches, echoes, stops, sampling, limits."""

import openai

from conformance.case import LLAMA, VLLM, Case, case
from conformance.server import API_KEY, BASE, MESSAGES, QUESTION, TEXT, Server

CASES: list[Case] = []
TEXTS = "openai/completion/test_completion.py"
LLAMA_TEXTS = "test_completion.py"
IDS = [5, 6, 7, 8, 9]


@case(CASES, VLLM, f"{TEXTS}: test_single_completion")
def a_text_is_continued_and_usage_adds_up(server: Server) -> None:
    reply = server.openai.completions.create(model=BASE, prompt=QUESTION, max_tokens=5, temperature=0)
    assert reply.id.startswith("cmpl-")
    assert (len(reply.choices), reply.choices[0].finish_reason) == (1, "length")
    number = len(server.tokens(QUESTION))
    usage = reply.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (number, 5, number + 5)


@case(CASES, LLAMA, f"{LLAMA_TEXTS}: test_completion_with_tokens_input")
def token_ids_texts_and_both_in_one_batch_mean_the_same(server: Server) -> None:
    ids = server.tokens(QUESTION)
    text = server.text()
    assert server.text(prompt=ids) == text
    for prompts in ([ids, ids], [ids, QUESTION]):
        choices = server.ask(TEXT, prompt=prompts)["choices"]
        assert [choice["text"] for choice in choices] == [text, text]


@case(CASES, VLLM, f"{TEXTS}: test_batch_completions")
def a_batch_has_n_choices_of_each_prompt_in_order(server: Server) -> None:
    for prompts in ([QUESTION] * 2, [IDS] * 2):
        choices = server.ask(TEXT, prompt=prompts, n=2, seed=1, temperature=1.0, max_tokens=12)["choices"]
        texts = [choice["text"] for choice in choices]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        assert texts[:2] == texts[2:]
        assert texts[0] != texts[1]
        streamed = [""] * 2
        for chunk in server.stream(TEXT, prompt=prompts):
            (choice,) = chunk["choices"]
            streamed[choice["index"]] += choice["text"]
        assert streamed[0] == streamed[1] == server.text(prompt=prompts[0])


@case(CASES, VLLM, f"{TEXTS}: test_no_logprobs")
def without_logprobs_a_text_has_none(server: Server) -> None:
    assert server.ask(TEXT, prompt=IDS, logprobs=None)["choices"][0]["logprobs"] is None


@case(CASES, VLLM, f"{TEXTS}: test_zero_logprobs")
def logprobs_0_reports_the_tokens_alone(server: Server) -> None:
    logprobs = server.ask(TEXT, prompt=IDS, logprobs=0)["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == len(logprobs["tokens"]) == 8
    assert [list(top.values()) for top in logprobs["top_logprobs"]] == [[one] for one in logprobs["token_logprobs"]]


@case(CASES, VLLM, f"{TEXTS}: test_some_logprobs")
def logprobs_5_reports_five_tokens(server: Server) -> None:
    logprobs = server.ask(TEXT, prompt=QUESTION, logprobs=5)["choices"][0]["logprobs"]
    assert all(len(top) == 5 for top in logprobs["top_logprobs"])
    assert all(
        value == max(top.values())
        for value, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    )


@case(CASES, VLLM, f"{TEXTS}: test_echo_logprob_completion")
def an_echo_begins_with_the_prompt_and_its_logprobs(server: Server) -> None:
    for prompt in (QUESTION, server.tokens(QUESTION)):
        choice = server.ask(TEXT, prompt=prompt, echo=True, logprobs=1)["choices"][0]
        assert choice["text"].startswith(QUESTION)
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        assert all(1 <= len(top) <= 2 for top in logprobs["top_logprobs"][1:])  # with the token itself
        number = len(server.tokens(QUESTION)) + 8
        assert [len(logprobs[name]) for name in ("tokens", "token_logprobs", "text_offset")] == [number] * 3


@case(
    CASES,
    VLLM,
    "openai/completion/test_completion_text_offset.py: test_stream_text_offset_matches_non_stream_with_stop_holdback",
)
def offsets_of_a_stream_are_those_of_a_full_answer(server: Server) -> None:
    fields = {"logprobs": 0, "stop": ["\n\n"], "max_tokens": 12}
    streamed = [
        offset for chunk in server.stream(TEXT, **fields) if chunk["choices"][0]["logprobs"]
        for offset in chunk["choices"][0]["logprobs"]["text_offset"]
    ]  # fmt: skip
    assert streamed == server.ask(TEXT, **fields)["choices"][0]["logprobs"]["text_offset"]
    assert len(streamed) == 12


@case(CASES, VLLM, f"{TEXTS}: test_completion_streaming")
def a_streamed_text_is_the_full_one_and_finishes_once(server: Server) -> None:
    choices = [chunk["choices"][0] for chunk in server.stream(TEXT)]
    assert "".join(choice["text"] for choice in choices) == server.text()
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert choices[-1]["finish_reason"] == "length"


@case(CASES, LLAMA, f"{LLAMA_TEXTS}: test_completion_stream_with_openai_library")
def the_openai_client_reads_a_stream_of_text(server: Server) -> None:
    # without strict validation, which refuses a chunk whose finish_reason is null, OpenAI's own too
    client = openai.OpenAI(base_url=f"{server.address}/v1", api_key=API_KEY, max_retries=0)
    chunks = client.completions.create(model=BASE, prompt=QUESTION, max_tokens=8, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == server.text()


@case(CASES, VLLM, f"{TEXTS}: test_completion_stream_options")
def the_usage_of_a_text_comes_last(server: Server) -> None:
    *_, last = server.stream(TEXT, stream_options={"include_usage": True})
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 8)


@case(CASES, VLLM, f"{TEXTS}: test_parallel_no_streaming")
def n_texts_differ_in_words_and_length(server: Server) -> None:
    chat = server.http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    choices = server.ask(TEXT, prompt=chat, n=3, max_tokens=50, temperature=1.5, logprobs=0, seed=42)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({choice["text"] for choice in choices}) == 3
    assert len({len(choice["logprobs"]["tokens"]) for choice in choices}) > 1


@case(CASES, VLLM, f"{TEXTS}: test_parallel_streaming")
def every_one_of_n_streamed_texts_finishes(server: Server) -> None:
    reasons = [
        (choice["index"], choice["finish_reason"])
        for chunk in server.stream(TEXT, n=3, max_tokens=50, temperature=1.0, seed=42)
        for choice in chunk["choices"]
        if choice["finish_reason"]
    ]
    assert sorted(index for index, _ in reasons) == [0, 1, 2]


@case(CASES, LLAMA, f"{LLAMA_TEXTS}: test_consistent_result_same_seed")
def a_seed_gives_the_same_text_each_time(server: Server) -> None:
    assert len({server.text(seed=42, temperature=1.0, max_tokens=20) for _ in range(4)}) == 1


@case(CASES, LLAMA, f"{LLAMA_TEXTS}: test_different_result_different_seed")
def other_seeds_give_other_texts(server: Server) -> None:
    assert len({server.text(seed=seed, temperature=1.0, max_tokens=20) for seed in range(4)}) == 4


@case(CASES, LLAMA, f"{LLAMA_TEXTS}: test_completion_stream_with_openai_library_stops")
def a_stop_text_ends_the_answer_and_is_not_in_it(server: Server) -> None:
    full = server.content(max_tokens=40)
    stop = full[12:15]
    for path, texts in (
        ("/v1/chat/completions", server.content(max_tokens=40, stop=stop)),
        ("/v1/chat/completions", server.content(max_tokens=40, stop=["\u2603", stop])),
    ):
        assert texts == full[: full.index(stop)], path
    chunks = server.stream("/v1/chat/completions", max_tokens=40, stop=[stop])
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == full[: full.index(stop)]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@case(CASES, VLLM, "openai/chat_completion/test_chat_stop_token_ids_validation.py: test_chat_stop_token_ids_valid")
def a_stop_token_ends_the_answer(server: Server) -> None:
    logprobs = server.ask(TEXT, logprobs=0)["choices"][0]["logprobs"]
    stop = server.tokens(logprobs["tokens"][0])[0]
    choice = server.ask(TEXT, stop_token_ids=[stop])["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    assert server.text(stop_token_ids=[3199]) == server.text()


@case(CASES, LLAMA, f"{LLAMA_TEXTS}: test_logit_bias", note="of token ids, not of texts")
def a_token_with_a_bias_of_minus_100_does_not_come(server: Server) -> None:
    ids = server.tokens("Mira from")
    text = server.text(max_tokens=30, logit_bias={str(token): -100 for token in ids})
    assert "Mira" in server.text(max_tokens=30)
    assert not set(ids) & set(server.tokens(text))


@case(CASES, VLLM, "openai/chat_completion/test_chat_logit_bias_validation.py: test_chat_logit_bias_valid")
def a_bias_of_the_last_token_is_taken(server: Server) -> None:
    assert server.text(logit_bias={"3199": 100}, max_tokens=1) != server.text(logit_bias={"3199": 1.0}, max_tokens=1)


@case(CASES, LLAMA, f"{LLAMA_TEXTS}: test_completion_parallel_slots")
def many_requests_at_once_get_what_each_gets_alone(server: Server) -> None:
    prompts = [f"{name} from Oslo ordered {number} lamps." for number, name in enumerate(("Mira", "Oren", "Leila"))]
    alone = [server.text(prompt=prompt, seed=1, temperature=1.0) for prompt in prompts]
    assert [choice["text"] for choice in server.ask(TEXT, prompt=prompts, seed=1, temperature=1.0)["choices"]] == alone


@case(CASES, LLAMA, "test_metrics.py: test_prompt_cache_metrics", note="counted in `usage`, as OpenAI does")
def a_prompt_that_came_before_is_read_from_the_cache(server: Server) -> None:
    prompt = list(range(100, 150))
    first, second = (server.ask(TEXT, prompt=prompt) for _ in range(2))
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (first, second)]
    assert cached == [0, 48]
    assert first["choices"] == second["choices"]


@case(CASES, VLLM, "openai/completion/test_empty_prompt_list.py: test_nonempty_prompt_list_ok")
def a_list_of_one_text_is_a_prompt(server: Server) -> None:
    assert server.text(prompt=[QUESTION]) == server.text()


@case(CASES, LLAMA, f"{LLAMA_TEXTS}: test_n_probs", note="OpenAI's `logprobs`, without token ids")
def every_token_has_as_many_logprobs_as_are_wanted(server: Server) -> None:
    logprobs = server.ask(TEXT, logprobs=10, max_tokens=5)["choices"][0]["logprobs"]
    assert all(10 <= len(top) <= 11 for top in logprobs["top_logprobs"])  # with the token itself
    assert all(value <= 0 for value in logprobs["token_logprobs"])


@case(CASES, VLLM, "openai/correctness/test_lmeval.py: test_lm_eval_accuracy_v1_engine")
def an_answer_that_ends_reports_the_end_token_with_its_logprob(server: Server) -> None:
    ids = server.http.post("/tokenize", json={"messages": [{"role": "user", "content": QUESTION}]}).json()["tokens"]
    answer = server.tokens(server.text(model="json", prompt=ids, max_tokens=60))
    choice = server.ask(TEXT, model="json", prompt=ids + answer, max_tokens=1, echo=True, logprobs=1)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["tokens"][-1] == "<|end|>"
    assert len(choice["logprobs"]["token_logprobs"]) == len(ids) + len(answer) + 1
