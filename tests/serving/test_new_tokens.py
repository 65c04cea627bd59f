"""A server whose adapters have different new tokens: each model has its own tokenizer, in one batch with the others."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import lorakit
from lorakit.base.transformers_io import load_base
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.lora import adapter_tensors
from lorakit.serving.app import OpenAIServer
from lorakit.serving.engine import ServingEngine
from tests.helpers import patient
from tests.helpers.http_server import serving

TOKENS = {"a": {"<|tool|>": 3200, "<|sep|>": 3201}, "b": {"<|sep|>": 3200}}


@pytest.fixture(scope="module")
def patches(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, patches = tmp_path_factory.mktemp("tokens"), {}
    for seed, (name, tokens) in enumerate(TOKENS.items()):
        adapted = lorakit.inject(load_base(base, torch.float32, torch.device("cpu")), rank=2, new_tokens=tokens)
        torch.manual_seed(seed)
        for key, tensor in adapter_tensors(adapted).items():
            tensor.data.normal_(std=1.0 if key.startswith("lm_head") else 0.3)  # so that answers have new tokens
        patches[name] = lorakit.save_patch(adapted, folder / name)
    return patches


@pytest.fixture(scope="module")
def model(base: Path, patches: dict[str, Path]) -> AdaptedModel:
    return lorakit.load(base, patches, dtype="float32")


@pytest.fixture(scope="module")
def client(model: AdaptedModel) -> Iterator[httpx.Client]:
    engine = ServingEngine(model, max_rows=4)
    with serving(OpenAIServer(model, engine, "tiny", []).app) as address, patient.Client(base_url=address) as opened:
        yield opened
    engine.close()


def test_requests_of_all_models_get_what_python_answers_with_each_alone(
    client: httpx.Client, model: AdaptedModel
) -> None:
    def ask(name: str) -> Any:
        body = {"model": name, "prompt": "hi <|sep|> <|tool|>", "max_tokens": 12, "logprobs": 3, "echo": True,
                "temperature": 0}  # fmt: skip
        return client.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]

    with ThreadPoolExecutor(3) as threads:
        answers = dict(zip(("a", "b", "tiny"), threads.map(ask, ("a", "b", "tiny")), strict=True))

    for name, answer in answers.items():
        adapter = None if name == "tiny" else name
        expected = model.generate(["hi <|sep|> <|tool|>"], adapter, raw=True, max_new_tokens=12)[0]
        assert answer["text"] == "hi <|sep|> <|tool|>" + expected
    assert any(token in answers["a"]["text"][19:] for token in TOKENS["a"])


def test_each_model_has_its_own_tokens(client: httpx.Client) -> None:
    def tokens(name: str) -> list[int]:
        body = {"model": name, "prompt": "<|sep|>", "add_special_tokens": False}
        reply: list[int] = client.post("/tokenize", json=body).raise_for_status().json()["tokens"]
        return reply

    assert tokens("a") == [3201]
    assert tokens("b") == [3200]
    assert max(tokens("tiny")) < 3200
    body = {"model": "b", "tokens": [3201]}
    assert "token ids below 3201" in client.post("/detokenize", json=body).json()["error"]["message"]
    refused = client.post("/v1/completions", json={"model": "tiny", "prompt": [3200], "max_tokens": 1})
    assert refused.status_code == 400
    assert "the token id 3200" in refused.json()["error"]["message"]


def test_a_restricted_answer_may_use_the_adapters_own_vocabulary(client: httpx.Client) -> None:
    restricted = {"response_format": {"type": "regex", "pattern": "[0-9]{3}"}, "max_tokens": 8}
    for name in ("a", "tiny"):
        answer = client.post("/v1/completions", json={"model": name, "prompt": "hi", **restricted})
        assert answer.raise_for_status().json()["choices"][0]["text"].isdigit()


def test_a_request_has_one_adapter_also_where_it_is_replaced_under_way(
    client: httpx.Client, model: AdaptedModel, patches: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = ["hi <|sep|> <|tool|>", "<|tool|> ho"]
    body = {"model": "x", "prompt": prompts, "max_tokens": 12, "temperature": 0, "echo": True}
    expected = {
        name: [prompt + model.generate([prompt], name, raw=True, max_new_tokens=12)[0] for prompt in prompts]
        for name in "ab"
    }

    def answers() -> list[str]:
        choices = client.post("/v1/completions", json=body).raise_for_status().json()["choices"]
        return [choice["text"] for choice in choices]

    def replace_after(*arguments: Any, **keywords: Any) -> list[int]:  # as another client may, in another thread
        ids = encode(*arguments, **keywords)
        model.load_adapter("x", patches["b"], replace=True)
        return ids

    model.load_adapter("x", patches["a"])
    codec = model.codec(model.adapter("x"))
    encode = codec.token_ids
    monkeypatch.setattr(codec, "token_ids", replace_after)
    try:
        assert answers() == expected["a"]
        assert answers() == expected["b"] != expected["a"]
    finally:
        model.unload_adapter("x")
