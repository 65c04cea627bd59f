"""Embeddings over HTTP are those of transformers' model on merged weights, for every adapter of a batch."""

import base64
import contextlib
import copy
import http.client
import json
import math
import shutil
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import lorakit
from lorakit.decoding.embedding import Embedder, EmbeddingInput
from lorakit.decoding.generation import QueueFullError
from lorakit.decoding.sampling import SamplingSettings
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.patch.pooling import read_pooling
from lorakit.serving import engine as engine_module
from lorakit.serving.app import OpenAIServer
from lorakit.serving.engine import ServingEngine
from tests.helpers import patient
from tests.helpers.bases import make_embedding_base
from tests.helpers.http_server import serving
from tests.helpers.patches import make_patch, save_trained_peft
from tests.helpers.serving import held_forwards, wait_until

TEXTS = ["hello", "one two three four five six seven", "Mira from Oslo ordered 3 lamps on Monday."]
NAMES = ("tiny", "a", "b")


@pytest.fixture(scope="module")
def embedding_base(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A base whose tokenizer appends an end token, which is pooled, as Qwen3-Embedding's does."""
    ending = copy.deepcopy(tokenizer)
    end = ending.eos_token
    ending.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, ending.eos_token_id)]
    )
    return make_embedding_base(tmp_path_factory.mktemp("bases") / "base", ending)


@pytest.fixture(scope="module")
def patches(embedding_base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("patches")
    return {name: make_patch(embedding_base, folder / name, seed=seed) for seed, name in enumerate("ab")}


@pytest.fixture(scope="module")
def model(embedding_base: Path, patches: dict[str, Path]) -> AdaptedModel:
    return lorakit.load(embedding_base, patches, dtype="float32")


@pytest.fixture(scope="module")
def folders(
    embedding_base: Path, patches: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The base, and the base merged with each patch."""
    merged = tmp_path_factory.mktemp("merged")
    for name, patch in patches.items():
        lorakit.merge(embedding_base, patch, out=merged / name)
    return {"tiny": embedding_base, **{name: merged / name for name in patches}}


@pytest.fixture(scope="module")
def served(model: AdaptedModel, engine: ServingEngine) -> Iterator[str]:
    with serving(OpenAIServer(model, engine, "tiny").app) as address:
        yield f"{address}/v1"


@pytest.fixture(scope="module")
def client(served: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served, api_key="none", max_retries=0) as opened:
        yield opened


def expected(folder: Path, ids: list[int], mode: str = "lasttoken", *, normalize: bool = True) -> Tensor:
    """Return an embedding by transformers alone."""
    with torch.no_grad():
        states = AutoModel.from_pretrained(folder).eval()(torch.tensor([ids])).last_hidden_state[0]
    pooled = states[-1] if mode == "lasttoken" else states.mean(0)
    return pooled / pooled.norm() if normalize else pooled


def token_ids(folder: Path, text: str) -> list[int]:
    return list(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])


def close_to(actual: Any, wanted: Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(actual), wanted, rtol=1e-4, atol=2e-6)


def post(address: str, **body: Any) -> httpx.Response:
    return patient.post(f"{address}/embeddings", json={"model": "tiny", **body})


def vectors(reply: httpx.Response) -> list[list[float]]:
    assert reply.status_code == 200, reply.text
    data = reply.json()["data"]
    assert [one["index"] for one in data] == [*range(len(data))]
    return [one["embedding"] for one in data]


def test_embeddings_of_base_and_adapters_asked_at_once_are_transformers_on_merged_weights(
    client: openai.OpenAI, folders: dict[str, Path]
) -> None:
    replies: dict[str, Any] = {}

    def ask(name: str) -> None:
        replies[name] = client.embeddings.create(model=name, input=TEXTS)  # base64, as the client wants it

    threads = [threading.Thread(target=ask, args=(name,)) for name in NAMES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    ids = [token_ids(folders["tiny"], text) for text in TEXTS]
    assert ids[0][-1] == AutoTokenizer.from_pretrained(folders["tiny"]).eos_token_id
    for name in NAMES:
        assert replies[name].model == name
        assert replies[name].usage.prompt_tokens == replies[name].usage.total_tokens == sum(map(len, ids))
        for row, one in zip(ids, replies[name].data, strict=True):
            close_to(one.embedding, expected(folders[name], row))
    with openai.OpenAI(base_url=client.base_url, api_key="none", _strict_response_validation=True) as strict:
        strict.embeddings.create(model="a", input=TEXTS, encoding_format="float")  # strict refuses any base64


def test_a_merged_model_pools_as_its_base_does(folders: dict[str, Path]) -> None:
    assert read_pooling(folders["a"]) == read_pooling(folders["tiny"])


def test_rows_of_a_batch_do_not_mix(model: AdaptedModel, folders: dict[str, Path]) -> None:
    pooling = read_pooling(folders["tiny"])
    ids = [[5 + (number * 7 + step) % 900 for step in range(3 + number)] for number in range(9)]
    with contextlib.closing(ServingEngine(model)) as engine:
        futures = [
            engine.embed([row], pooling, None if name == "tiny" else name)[0]
            for row, name in zip(ids, NAMES * 3, strict=True)
        ]
        for row, name, future in zip(ids, NAMES * 3, futures, strict=True):
            close_to(future.result(), expected(folders[name], row, normalize=False))


def test_an_adapter_that_peft_put_on_the_model_without_its_head_has_pefts_embeddings(
    embedding_base: Path, tmp_path: Path
) -> None:
    config: Any = {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "FEATURE_EXTRACTION"}
    peft = save_trained_peft(tmp_path / "patch", embedding_base, AutoModel, **config)
    model, ids = lorakit.load(embedding_base, {"x": tmp_path / "patch"}, dtype="float32"), [5, 6, 7, 8]
    with torch.no_grad():
        wanted = peft(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
    with contextlib.closing(ServingEngine(model)) as engine:
        (future,) = engine.embed([ids], read_pooling(embedding_base), "x")
        close_to(future.result(), wanted)
        assert not torch.equal(wanted, expected(embedding_base, ids, normalize=False))
    with model.merged("x") as merged, torch.no_grad():
        close_to(merged.model.base_model(torch.tensor([ids])).last_hidden_state[0, -1], wanted)


def test_texts_and_their_token_ids_have_one_embedding_as_numbers_or_base64(
    served: str, folders: dict[str, Path]
) -> None:
    ids = [token_ids(folders["tiny"], text) for text in TEXTS]
    by_text = vectors(post(served, input=TEXTS, user="somebody"))
    close_to(vectors(post(served, input=ids)), torch.tensor(by_text))
    close_to(vectors(post(served, input=ids[1], encoding_format="float"))[0], torch.tensor(by_text[1]))
    close_to(vectors(post(served, input=TEXTS[2]))[0], torch.tensor(by_text[2]))
    (text,) = vectors(post(served, input=TEXTS[0], encoding_format="base64"))
    assert isinstance(text, str)
    close_to(struct.unpack("<32f", base64.b64decode(text)), torch.tensor(by_text[0]))


@pytest.mark.parametrize("mode", ["lasttoken", "mean"])
def test_a_long_input_is_computed_in_parts_between_which_streams_go_on(
    tmp_path: Path, tokenizer: Any, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "PREFILL_TOKENS", 4)
    base = make_embedding_base(tmp_path / "base", tokenizer, mode, normalize=False)
    model, long = lorakit.load(base, dtype="float32"), [(11 * step) % 900 for step in range(250)]
    with contextlib.closing(ServingEngine(model)) as engine:
        (first,) = engine.embed([long], read_pooling(base))
        (second,) = engine.embed([[7, 8, 9]], read_pooling(base))
        answer = engine.submit([5, 6], None, SamplingSettings(max_tokens=10, min_tokens=10)).ids()
        assert not first.done()
        assert len(answer) == 10
        close_to(first.result(), expected(base, long, mode, normalize=False))
        close_to(second.result(), expected(base, [7, 8, 9], mode, normalize=False))


def test_inputs_that_are_padded_beyond_the_budget_are_computed_together(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_embedding_base(tmp_path / "base", tokenizer, "lasttoken", normalize=False)
    model = lorakit.load(base, dtype="bfloat16")
    numbers: list[int] = []
    compute = Embedder._compute

    def counted(embedder: Embedder, inputs: list[EmbeddingInput], budget: int) -> Iterator[None]:
        numbers.append(len(inputs))
        return compute(embedder, inputs, budget)

    monkeypatch.setattr(Embedder, "_compute", counted)
    with contextlib.closing(ServingEngine(model)) as engine:
        vectors = engine.embed([[5] * 250, [6] * 250], read_pooling(base))
        assert all(vector.result().isfinite().all() for vector in vectors)
    assert numbers == [2]


def test_an_embedding_is_cut_where_the_base_allows_it_and_normalised_after(
    folders: dict[str, Path], served: str, tmp_path: Path
) -> None:
    refused = post(served, input="hello", dimensions=8)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "dimensions")
    base = Path(shutil.copytree(folders["tiny"], tmp_path / "base"))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"matryoshka_dimensions": [8, 16]}))
    model = lorakit.load(base, dtype="float32")
    with (
        contextlib.closing(ServingEngine(model)) as engine,
        serving(OpenAIServer(model, engine, "tiny").app) as address,
    ):
        (cut,) = vectors(post(f"{address}/v1", input="hello", dimensions=8))
        other = post(f"{address}/v1", input="hello", dimensions=9)
    full = expected(base, token_ids(base, "hello"), normalize=False)[:8]
    close_to(cut, full / full.norm())
    assert "dimensions: one of 8, 16, got 9" in other.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"input": ""}, 400, "none of them empty"),
        ({"input": ["hello", ""]}, 400, "none of them empty"),
        ({"input": []}, 400, "input: a text, token ids, or a list of them"),
        ({"input": [[]]}, 400, "input: a text, token ids, or a list of them"),
        ({"input": ["hello", 5]}, 400, "input: a text, token ids, or a list of them"),
        ({}, 400, "input: is required"),
        ({"input": ["a"] * 2049}, 400, "up to 2048"),
        ({"input": ["hello", "hello " * 400]}, 400, "tokens; from 1 to 256 can be embedded"),
        ({"input": [10_000_000]}, 400, "the token id 10000000"),
        ({"input": "hello", "encoding_format": "int8"}, 400, "encoding_format: should be 'float' or 'base64'"),
        ({"input": "hello", "truncate_prompt_tokens": 4}, 400, "truncate_prompt_tokens: not supported here"),
        ({"input": "hello", "temperature": 1}, 400, "temperature: not supported here"),
        ({"input": "hello", "model": "nobody"}, 404, "there are tiny, a, b"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
def test_what_cannot_be_embedded_is_refused_by_name(served: str, body: dict[str, Any], status: int, said: str) -> None:
    reply = post(served, **body)
    error = reply.json()["error"]
    assert (reply.status_code, said in error["message"]) == (status, True), reply.text
    assert error["param"] in ("input", *body)


@pytest.mark.parametrize("removed", [True, False])
def test_a_base_without_embeddings_serves_its_answers(folders: dict[str, Path], tmp_path: Path, removed: bool) -> None:
    base, lines = Path(shutil.copytree(folders["tiny"], tmp_path / "base")), []
    if removed:
        (base / "modules.json").unlink()
    else:
        (base / "modules.json").write_text('[{"path": "", "type": "sentence_transformers.models.WordWeights"}]')
    model = lorakit.load(base, dtype="float32")
    with contextlib.closing(ServingEngine(model)) as engine:
        app = OpenAIServer(model, engine, "tiny", log=lambda line: lines.append(dict(line))).app
        with serving(app) as address:
            reply = post(f"{address}/v1", input="hello")
            body = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
            assert patient.post(f"{address}/v1/completions", json=body).status_code == 200
    said = "this base has no embeddings" if removed else "WordWeights is not computed here"
    assert (reply.status_code, said in reply.json()["error"]["message"]) == (400, True), reply.text
    assert str(base) not in reply.text
    assert [line["event"] for line in lines if "event" in line] == ([] if removed else ["no embeddings"])


def test_an_adapter_that_overflows_fails_its_own_inputs_alone(
    embedding_base: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    huge = make_patch(embedding_base, tmp_path / "huge", targets=["up_proj", "down_proj"], alpha=4e5)
    model = lorakit.load(embedding_base, {"huge": huge}, dtype="float16")
    pooling = read_pooling(embedding_base)
    with (
        contextlib.closing(ServingEngine(model)) as engine,
        serving(OpenAIServer(model, engine, "tiny").app) as address,
    ):
        (sound,), (broken,) = engine.embed([[5, 6, 7]], pooling), engine.embed([[5, 6, 7]], pooling, "huge")
        assert isinstance(broken.exception(), ArithmeticError)
        wanted = expected(folders["tiny"], [5, 6, 7], normalize=False)
        torch.testing.assert_close(sound.result(), wanted, rtol=2e-2, atol=2e-2)
        reply = post(f"{address}/v1", input="hello", model="huge")
    assert (reply.status_code, reply.json()["error"]["type"]) == (500, "server_error")


def test_a_client_that_leaves_frees_its_inputs_and_the_log_says_499(model: AdaptedModel, embedding_base: Path) -> None:
    lines: list[dict[str, Any]] = []
    body = {"model": "a", "input": [[5] * 200] * 500}
    with (
        contextlib.closing(ServingEngine(model, max_queue=400)) as engine,
        serving(OpenAIServer(model, engine, "tiny", log=lambda line: lines.append(dict(line))).app) as address,
        held_forwards(model) as forwards,
    ):
        client = http.client.HTTPConnection(address.removeprefix("http://"))
        client.request("POST", "/v1/embeddings", json.dumps(body), {"Content-Type": "application/json"})
        wait_until(lambda: engine.counts()["embedding"] > 400)
        client.close()
        with pytest.raises(QueueFullError):
            engine.embed([[5]], read_pooling(embedding_base))
        wait_until(lambda: lines)
        forwards.allow(math.inf)
        wait_until(lambda: not engine.counts()["embedding"])
        assert lines[0]["status"] == 499
        metrics = patient.get(f"{address}/metrics").text
    assert 'lorakit_requests_total{adapter="a",status="499"} 1.0' in metrics
    assert 'lorakit_prompt_tokens_total{adapter="a"} 100000.0' in metrics


def test_inputs_that_wait_when_the_engine_ends_get_a_503(model: AdaptedModel) -> None:
    engine = ServingEngine(model)
    replies: list[httpx.Response] = []
    with serving(OpenAIServer(model, engine, "tiny").app) as address, held_forwards(model) as forwards:
        body: Any = {"input": [[5] * 200] * 100}
        thread = threading.Thread(target=lambda: replies.append(post(f"{address}/v1", **body)))
        thread.start()
        wait_until(lambda: engine.counts()["embedding"])
        closing = threading.Thread(target=engine.close)
        closing.start()
        wait_until(lambda: engine._closed)  # it ends after the step under way
        forwards.allow(math.inf)
        closing.join()
        thread.join()
    assert replies[0].status_code == 503


def test_a_server_whose_engine_is_closed_answers_503(model: AdaptedModel) -> None:
    engine = ServingEngine(model)
    engine.close()
    with serving(OpenAIServer(model, engine, "tiny").app) as address:
        replies = [
            post(f"{address}/v1", input="hello"),
            patient.post(f"{address}/v1/completions", json={"model": "tiny", "prompt": "hello"}),
        ]
    assert [reply.status_code for reply in replies] == [503, 503]
    assert "restart the server" in replies[0].json()["error"]["message"]
