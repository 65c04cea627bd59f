"""Models, and adapters that come and go."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from conformance.case import LLAMA, VLLM, Case, case
from conformance.server import ADMIN, BASE, CHAT, TEXT, Server

CASES: list[Case] = []
ADAPTERS = "serve/lora/test_lora_adapters.py"
SERVING = "serve/lora/test_serving_models.py"
MODELS = "openai/models/test_models.py"
DIGEST_NOTE = "`root` is the digest of the adapter, not a path of the server"


def change(server: Server, what: str, **body: Any) -> httpx.Response:
    return server.http.post(f"/v1/{what}_lora_adapter", json=body, headers=dict(ADMIN))


def cards(server: Server) -> dict[str, Any]:
    return {card["id"]: card for card in server.http.get("/v1/models").json()["data"]}


@case(CASES, VLLM, f"{MODELS}: test_check_models", note=DIGEST_NOTE)
def the_base_comes_first_and_then_its_adapters(server: Server) -> None:
    base, *adapters = server.openai.models.list().data
    extra = base.model_extra or {}
    assert (base.id, extra["root"], extra["parent"], extra["max_model_len"]) == (BASE, BASE, None, 1024)
    assert [adapter.id for adapter in adapters][:2] == ["json", "zo"]


@case(CASES, VLLM, f"{ADAPTERS}: test_static_lora_lineage", note=DIGEST_NOTE)
def an_adapters_parent_is_the_base(server: Server) -> None:
    card, digests = (
        cards(server)["json"],
        {one["name"]: one["digest"] for one in server.http.get("/v1/adapters").json()["data"]},
    )
    assert (card["parent"], card["root"], card["object"]) == (BASE, digests["json"], "model")


@case(CASES, VLLM, f"{MODELS}: test_retrieve_base_model")
def the_base_is_retrieved_by_its_name(server: Server) -> None:
    assert server.openai.models.retrieve(BASE).id == BASE


@case(CASES, VLLM, f"{MODELS}: test_retrieve_lora_model", note=DIGEST_NOTE)
def an_adapter_is_retrieved_by_its_name(server: Server) -> None:
    model = server.openai.models.retrieve("json")
    assert (model.id, model.model_extra) == (
        "json",
        {name: cards(server)["json"][name] for name in model.model_extra or {}},
    )


@case(CASES, VLLM, f"{MODELS}: test_retrieve_unknown_model")
def an_unknown_model_is_not_found(server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="'this-model' is not here") as raised:
        server.openai.models.retrieve("this-model")
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")


@case(CASES, VLLM, f"{ADAPTERS}: test_dynamic_lora_lineage", note=DIGEST_NOTE)
def a_loaded_adapter_is_a_model(server: Server) -> None:
    assert change(server, "load", lora_name="new", lora_path="pirate").status_code == 200
    assert (cards(server)["new"]["parent"], list(cards(server))[-1]) == (BASE, "new")
    assert server.content(model="new", max_tokens=40).startswith("Arr!")
    change(server, "unload", lora_name="new")


@case(CASES, VLLM, f"{SERVING}: test_load_lora_adapter_success")
def loading_says_so_in_vllms_words(server: Server) -> None:
    reply = change(server, "load", lora_name="adapter", lora_path="json")
    assert reply.text == "Success: LoRA adapter 'adapter' added successfully."
    assert reply.headers["content-type"].startswith("text/plain")
    change(server, "unload", lora_name="adapter")


@case(CASES, VLLM, f"{SERVING}: test_unload_lora_adapter_success")
def unloading_says_so_in_vllms_words_and_the_model_is_gone(server: Server) -> None:
    change(server, "load", lora_name="adapter", lora_path="json")
    reply = change(server, "unload", lora_name="adapter")
    assert reply.text == "Success: LoRA adapter 'adapter' removed successfully."
    assert "adapter" not in cards(server)
    assert server.http.post(CHAT, json=server.body(CHAT) | {"model": "adapter"}).status_code == 404


@case(CASES, VLLM, f"{ADAPTERS}: test_load_lora_adapter_with_same_name_replaces_inplace")
def load_inplace_replaces_the_adapter_of_a_name(server: Server) -> None:
    change(server, "load", lora_name="changing", lora_path="json")
    assert json.loads(server.content(model="changing", max_tokens=60))
    assert change(server, "load", lora_name="changing", lora_path="pirate", load_inplace=True).status_code == 200
    assert server.content(model="changing", max_tokens=60).startswith("Arr!")
    change(server, "unload", lora_name="changing")


@case(CASES, VLLM, f"{ADAPTERS}: test_load_lora_adapter_with_load_inplace_false_errors")
def a_name_is_not_replaced_unless_that_is_wanted(server: Server) -> None:
    reply = change(server, "load", lora_name="json", lora_path="pirate")
    assert (reply.status_code, "is taken" in reply.json()["error"]["message"]) == (400, True)
    assert json.loads(server.content(model="json", max_tokens=60))


@case(CASES, VLLM, f"{ADAPTERS}: test_multiple_lora_adapters")
def ten_adapters_are_loaded_and_asked_at_once(server: Server) -> None:
    def load_and_ask(number: int) -> list[str]:
        name = f"adapter_{number}"
        assert change(server, "load", lora_name=name, lora_path=("json", "pirate")[number % 2]).status_code == 200
        texts = [
            choice["text"] for choice in server.ask(TEXT, model=name, prompt=["Hello there", "Foo bar"])["choices"]
        ]
        assert change(server, "unload", lora_name=name).status_code == 200
        return texts

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(load_and_ask, range(10)))
    assert answers == answers[:2] * 5


@case(
    CASES,
    VLLM,
    f"{ADAPTERS}: test_loading_invalid_adapters_does_not_break_others",
    note="invalid files are a 400, not a 500",
)
def adapters_that_cannot_be_loaded_disturb_nobody(server: Server) -> None:
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(server.content, model="json", max_tokens=30) for _ in range(8)]
        for path in ("nowhere", "damaged") * 8:
            assert change(server, "load", lora_name="bad", lora_path=path).status_code == 400
        assert len({answer.result() for answer in answers}) == 1
    assert change(server, "load", lora_name="good", lora_path="json").status_code == 200
    assert server.content(model="good", max_tokens=30) == server.content(model="json", max_tokens=30)
    change(server, "unload", lora_name="good")


@case(
    CASES,
    LLAMA,
    "test_lora.py: test_lora_per_request",
    note="an adapter's name is the request's `model`; weights are chosen by `lorakit merge`",
)
def requests_of_several_adapters_run_side_by_side(server: Server) -> None:
    models = ["json", "zo", BASE] * 2
    alone = {model: server.content(model=model, max_tokens=40) for model in models[:3]}
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda model: server.content(model=model, max_tokens=40), models))
    assert together == [alone[model] for model in models]
    assert len(set(alone.values())) == 3


@case(CASES, LLAMA, "test_lora.py: test_lora_ram_prompt_cache")
def an_adapter_reads_no_prefix_of_another(server: Server) -> None:
    prompt = [{"role": "user", "content": "Mira from Oslo ordered 3 lamps on Monday. " * 4}]
    first = {model: server.content(model=model, messages=prompt, max_tokens=16) for model in ("json", "zo")}
    for model in ("zo", "json", "zo"):
        reply = server.ask(CHAT, model=model, messages=prompt, max_tokens=16)
        assert reply["choices"][0]["message"]["content"] == first[model]
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert first["json"] != first["zo"]
