"""`/classify` and `/pooling`: each adapter's own head, beside answers of others."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import lorakit
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.serving.app import OpenAIServer
from lorakit.serving.engine import ServingEngine
from tests.helpers.http_server import serving
from tests.helpers.patches import make_head_patch, make_patch

TEXTS = ["hello", "one two three four five six seven", "Mira from Oslo ordered 3 lamps on Monday."]


@pytest.fixture(scope="module")
def model(base: Path, tmp_path_factory: pytest.TempPathFactory) -> AdaptedModel:
    folder = tmp_path_factory.mktemp("patches")
    adapters = {
        "labels": make_head_patch(base, folder / "labels", 3),
        "reward": make_head_patch(base, folder / "reward", 1, seed=1),
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


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/classify", {"model": "reward", "input": "hi"}, "gives a number"),
        ("/classify", {"model": "tiny", "input": "hi"}, "has no head of its own"),
        ("/classify", {"model": "plain", "input": "hi"}, "has no head of its own"),
        ("/classify", {"model": "labels"}, "one of input and messages"),
        ("/classify", {"model": "labels", "input": []}, "input"),
        ("/classify", {"model": "labels", "input": [[10**6]]}, "token id 1000000"),
        ("/classify", {"model": "labels", "input": [[1] * 2000]}, "tokens"),
        ("/classify", {"model": "labels", "input": "hi", "dimensions": 3}, "dimensions"),
        ("/v1/chat/completions", {"model": "labels", "messages": [{"role": "user", "content": "hi"}]}, "it classifies"),
        ("/v1/completions", {"model": "reward", "prompt": "hi"}, "it gives a number"),
    ],
)
def test_what_a_head_cannot_answer_is_400_with_the_reason(
    url: str, path: str, body: dict[str, Any], message: str
) -> None:
    status, said = post(url, path, **body)
    assert status == 400
    assert message in said
