"""`/classify` and `/pooling`: each adapter's own head, beside answers of others."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import lorakit
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.serving.app import OpenAIServer
from lorakit.serving.engine import ServingEngine
from tests.helpers.http_server import serving
from tests.helpers.patches import make_embedding_patch, make_head_patch, make_patch

TEXTS = ["hello", "one two three four five six seven", "Mira from Oslo ordered 3 lamps on Monday."]


@pytest.fixture(scope="module")
def model(base: Path, tmp_path_factory: pytest.TempPathFactory) -> AdaptedModel:
    folder = tmp_path_factory.mktemp("patches")
    adapters = {
        "labels": make_head_patch(base, folder / "labels", 3),
        "reward": make_head_patch(base, folder / "reward", 1, seed=1),
        "relevant": make_head_patch(base, folder / "relevant", 2, seed=2),
        "near": make_embedding_patch(base, folder / "near"),
        "plain": make_patch(base, folder / "plain"),
    }
    return lorakit.load(base, adapters, dtype="float32")


@pytest.fixture(scope="module")
def url(model: AdaptedModel) -> Iterator[str]:
    engine = ServingEngine(model)
    with serving(OpenAIServer(model, engine, "tiny").app) as address:
        yield address
    engine.close()


def post(url: str, path: str, **body: Any) -> Any:
    reply = httpx.post(f"{url}{path}", json=body, timeout=60)
    return reply.json() if reply.status_code == 200 else (reply.status_code, reply.json()["error"]["message"])


def test_labels_are_those_of_python_beside_answers_of_other_adapters(url: str, model: AdaptedModel) -> None:
    expected = model.classify(TEXTS, "labels")

    def ask(number: int) -> Any:
        chat = {"model": "plain", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0}
        if number % 2:
            return post(url, "/v1/chat/completions", **chat)
        return post(url, "/classify", model="labels", input=TEXTS)

    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(ask, range(12)))

    for reply in replies[::2]:
        for index, (item, one) in enumerate(zip(reply["data"], expected, strict=True)):
            assert (item["index"], item["label"], item["num_classes"]) == (index, one.label, 3)
            assert item["probs"] == pytest.approx(list(one.probabilities.values()), rel=1e-5)
    codec = model.codec(model.adapter("labels"))
    assert replies[0]["usage"]["prompt_tokens"] == sum(len(codec.row_ids(text)) for text in TEXTS)
    assert len({reply["choices"][0]["message"]["content"] for reply in replies[1::2]}) == 1


def test_a_reward_is_the_value_of_a_conversation(url: str, model: AdaptedModel) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]

    reply = post(url, "/pooling", model="reward", messages=messages)

    assert reply["data"][0]["data"] == pytest.approx(model.reward([messages], "reward"), rel=1e-5)


@pytest.mark.parametrize("name", ["reward", "relevant", "near"])
def test_documents_are_ranked_by_a_head_of_both_texts_or_by_embeddings(
    url: str, model: AdaptedModel, name: str
) -> None:
    query, documents = "one two", [*TEXTS, "another one"]
    both = [[{"role": "user", "content": query}, {"role": "assistant", "content": text}] for text in documents]
    if name == "near":
        vectors = torch.nn.functional.normalize(model.embed([query, *documents], name))
        expected = (vectors[1:] @ vectors[0]).tolist()
    elif name == "reward":
        expected = model.reward(both, name)
    else:
        expected = [list(one.probabilities.values())[1] for one in model.classify(both, name)]

    scored = post(url, "/score", model=name, text_1=query, text_2=documents)
    assert [one["score"] for one in scored["data"]] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    in_pairs = post(url, "/score", model=name, text_1=[query] * 4, text_2=documents)
    assert in_pairs["data"] == scored["data"]

    ranked = post(url, "/rerank", model=name, query=query, documents=documents, top_n=3)["results"]
    order = sorted(range(4), key=lambda index: -expected[index])[:3]
    assert [one["index"] for one in ranked] == order
    assert [one["document"]["text"] for one in ranked] == [documents[index] for index in order]
    assert ranked[0]["relevance_score"] == pytest.approx(max(expected), rel=1e-4)


@pytest.mark.parametrize(
    ("path", "body", "message", "param"),
    [
        ("/classify", {"model": "reward", "input": "hi"}, "gives a number", "model"),
        ("/classify", {"model": "tiny", "input": "hi"}, "has no head of its own", "model"),
        ("/classify", {"model": "plain", "input": "hi"}, "has no head of its own", "model"),
        ("/score", {"model": "labels", "text_1": "hi", "text_2": "you"}, "of one value or two labels", "model"),
        ("/score", {"model": "plain", "text_1": "hi", "text_2": "you"}, "this base has no embeddings", "model"),
        ("/score", {"model": "reward", "text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "got 2 and 3", "text_1"),
        ("/score", {"model": "reward", "text_1": "a", "text_2": []}, "text_2", "text_2"),
        ("/rerank", {"model": "reward", "query": "a", "documents": []}, "documents", "documents"),
        ("/rerank", {"model": "reward", "query": "a", "documents": ["b"], "top_n": 0}, "top_n", "top_n"),
        ("/rerank", {"model": "reward", "query": "a", "documents": ["b " * 999]}, "fit this base", None),
        ("/classify", {"model": "labels"}, "one of input and messages", "input"),
        ("/classify", {"model": "labels", "input": []}, "input", "input"),
        ("/classify", {"model": "labels", "input": [[10**6]]}, "token id 1000000", "input"),
        ("/classify", {"model": "labels", "input": [[1] * 2000]}, "tokens", "input"),
        ("/classify", {"model": "labels", "input": "hi", "dimensions": 3}, "dimensions", "dimensions"),
        (
            "/v1/chat/completions",
            {"model": "labels", "messages": [{"role": "user", "content": "hi"}]},
            "it classifies",
            "model",
        ),
        ("/v1/completions", {"model": "reward", "prompt": "hi"}, "it gives a number", "model"),
    ],
)
def test_what_a_head_cannot_answer_is_400_with_the_reason(
    url: str, path: str, body: dict[str, Any], message: str, param: str | None
) -> None:
    reply = httpx.post(f"{url}{path}", json=body, timeout=60)
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert message in error["message"]
    assert error["param"] == param
