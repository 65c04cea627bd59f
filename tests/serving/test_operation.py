"""What an operator sees of a server: its health, its log, its metrics, its adapters and its document."""

import json
import math
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import lorakit
from lorakit.decoding.sampling import SamplingSettings
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.patch import read_patch
from lorakit.serving import app as app_module
from lorakit.serving.adapter_pool import AdapterPool
from lorakit.serving.app import PAGE_FILES, OpenAIServer
from lorakit.serving.engine import ServingEngine
from lorakit.serving.prometheus import RequestMetrics
from lorakit.serving.request_log import RequestRecord
from tests.helpers import patient
from tests.helpers.fork_server import ROOT
from tests.helpers.http_server import serving
from tests.helpers.patches import make_patch
from tests.helpers.serving import held_forwards, wait_until

TEXT: Any = {"model": "a", "prompt": "hello\nthere", "max_tokens": 4, "min_tokens": 4}
Lines = list[dict[str, Any]]


@pytest.fixture
def lines() -> Lines:
    return []


@pytest.fixture
def client(model: AdaptedModel, engine: ServingEngine, lines: Lines) -> Iterator[httpx.Client]:
    """A client of a new server without keys, whose log is `lines`."""
    app = OpenAIServer(model, engine, "tiny", log=lambda line: lines.append(dict(line))).app
    with serving(app) as address, patient.Client(base_url=address) as opened:
        yield opened


def logged(lines: Lines, number: int = 1) -> Lines:
    """Return the lines when there are so many; a line is written after its answer's last byte."""
    wait_until(lambda: len(lines) >= number)
    return lines


def samples(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return (name, values of the labels in the order of their names) -> value."""
    return {
        (sample.name, tuple(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_each_request_has_a_line_and_an_id_and_no_prompt(client: httpx.Client, lines: Lines) -> None:
    reply = client.post("/v1/completions", json=TEXT | {"n": 2}, headers={"X-Request-Id": "my-id"})
    other = client.post("/v1/completions", json=TEXT | {"stream": True})
    client.get("/health")
    client.post("/v1/completions", json=TEXT | {"model": "nobody\n{}"})
    client.get("/nothing/here")

    first, streamed, unknown, nowhere = logged(lines, 4)
    assert reply.headers["x-request-id"] == first["id"] == "my-id"
    assert other.headers["x-request-id"] == streamed["id"] != unknown["id"]
    assert list(first) == [
        "id", "method", "path", "status", "model", "prompt_tokens", "completion_tokens", "seconds", "ttft",
    ]  # fmt: skip
    usage = reply.json()["usage"]
    assert (first["method"], first["path"], first["status"]) == ("POST", "/v1/completions", 200)
    assert (first["prompt_tokens"], first["completion_tokens"]) == (usage["prompt_tokens"], 8)
    assert 0 < first["ttft"] <= first["seconds"]
    assert (streamed["status"], streamed["completion_tokens"]) == (200, 4)
    assert (unknown["status"], unknown["model"], unknown["ttft"]) == (404, "nobody\n{}", None)
    assert (nowhere["status"], nowhere["model"]) == (404, None)
    assert (unknown["error"], nowhere["error"]) == ("model_not_found: model", "GET /nothing/here: no such route.")
    assert "hello" not in json.dumps(lines)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"temperature": 1000}, "temperature: should be less than or equal to 100, got 1000"),
        ({"prompt": [["secret"]]}, "prompt: a text, token ids, or a list of them;"),
        ({"suffix": "secret"}, "suffix: not supported here, and it may change the answer; leave it out"),
        ({"max_tokens": 9999}, "context_length_exceeded: This model's maximum context length is"),
        ({"stop": "secret" * 200}, "stop: a text, or a list of up to 16 texts"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_line_says_why_a_request_failed_and_quotes_nothing(
    client: httpx.Client, lines: Lines, change: dict[str, Any], said: str
) -> None:
    assert client.post("/v1/completions", json=TEXT | {"prompt": "secret"} | change).status_code == 400
    (line,) = logged(lines)
    assert (line["model"], line["error"].startswith(said)) == ("a", True), line
    assert "secret" not in json.dumps(line)


def test_the_error_of_a_chat_says_which_message_is_wrong(client: httpx.Client, lines: Lines) -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": "secret"}]}]
    assert client.post("/v1/chat/completions", json={"model": "b", "messages": messages}).status_code == 400
    (line,) = logged(lines)
    assert (line["model"], line["error"].startswith("messages[0]")) == ("b", True), line
    assert "secret" not in json.dumps(line)


@pytest.mark.parametrize("given", ["", "two words", "x" * 129, "ümlaut".encode()])
def test_an_id_that_is_none_is_replaced(client: httpx.Client, lines: Lines, given: str | bytes) -> None:
    reply = client.get("/v1/models", headers=[(b"X-Request-Id", given if isinstance(given, bytes) else given.encode())])
    assert len(reply.headers["x-request-id"]) == 32
    assert logged(lines)[0]["id"] == reply.headers["x-request-id"]


def test_an_error_that_nobody_expects_is_a_500_without_its_text(
    client: httpx.Client, lines: Lines, engine: ServingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(engine, "submit", fail)
    reply = client.post("/v1/completions", json=TEXT)
    assert (reply.status_code, reply.json()["error"]["message"]) == (500, "internal error: RuntimeError")
    assert reply.json()["error"]["type"] == "server_error"
    assert (logged(lines)[0]["status"], lines[0]["error"]) == (500, "internal error: RuntimeError")


def test_a_refused_key_and_a_client_that_leaves_are_logged(
    model: AdaptedModel, engine: ServingEngine, lines: Lines
) -> None:
    server = OpenAIServer(
        model, engine, "tiny", ["secret"], log=lambda line: lines.append(dict(line)), log_prompts=True
    )
    with serving(server.app) as address, held_forwards(model) as forwards:
        assert patient.post(f"{address}/v1/completions", json=TEXT).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        # with log-probabilities, because a token without any text has an event then
        body = TEXT | {"max_tokens": 200, "min_tokens": 200, "stream": True, "logprobs": 0}
        forwards.allow(1)  # of the first token
        with patient.stream("POST", f"{address}/v1/completions", json=body, headers=headers) as reply:
            next(reply.iter_lines())
        refused, left = logged(lines, 2)
        metrics = samples(patient.get(f"{address}/metrics", headers=headers).text)
    assert (refused["status"], refused["model"], refused["prompt"]) == (401, None, None)
    assert refused["error"] == "invalid_api_key: a valid key is required: Authorization: Bearer KEY"
    assert "error" not in left
    assert (left["status"], left["model"], left["prompt"]) == (499, "a", "hello\nthere")
    assert metrics["lorakit_requests_total", ("", "401")] == metrics["lorakit_requests_total", ("a", "499")] == 1


def test_metrics_count_tokens_and_seconds_per_adapter_and_in_all(client: httpx.Client) -> None:
    replies = [client.post("/v1/completions", json=TEXT | {"model": name}).json() for name in ("a", "a", "b", "tiny")]
    client.post("/v1/completions", json=TEXT | {"model": "nobody"})
    client.post("/v1/completions", json=TEXT | {"min_tokens": 9})

    metrics = samples(client.get("/metrics").text)

    prompt_tokens = replies[0]["usage"]["prompt_tokens"]
    for name, number in (("a", 2), ("b", 1), ("tiny", 1)):
        assert metrics["lorakit_requests_total", (name, "200")] == number
        assert metrics["lorakit_prompt_tokens_total", (name,)] == number * prompt_tokens
        assert metrics["lorakit_generation_tokens_total", (name,)] == number * 4
        assert metrics["lorakit_answers_total", (name, "length")] == number
        for histogram, count in (
            ("time_to_first_token_seconds", 1), ("inter_token_seconds", 3), ("request_seconds", 1),
            ("time_per_output_token_seconds", 1),
        ):  # fmt: skip
            assert metrics[f"lorakit_{histogram}_count", (name,)] == number * count
            assert metrics[f"lorakit_{histogram}_bucket", (name, "+Inf")] == number * count
            assert 0 < metrics[f"lorakit_{histogram}_sum", (name,)] < 60
    assert metrics["lorakit_requests_total", ("", "404")] == 1
    assert metrics["lorakit_requests_total", ("a", "400")] == 1
    assert metrics["vllm:prompt_tokens_total", ("tiny",)] == 4 * prompt_tokens
    assert metrics["vllm:generation_tokens_total", ("tiny",)] == 16
    assert metrics["vllm:request_success_total", ("length", "tiny")] == 4
    assert metrics["vllm:num_requests_running", ("tiny",)] == metrics["vllm:num_requests_waiting", ("tiny",)] == 0
    for name in (
        "time_to_first_token_seconds", "e2e_request_latency_seconds", "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
    ):  # fmt: skip
        assert metrics[f"vllm:{name}_count", ("tiny",)] == (12 if name.startswith("inter") else 4)
    assert not any("nobody" in labels for _, labels in metrics)


def test_metrics_show_what_is_under_way(model: AdaptedModel, client: httpx.Client, engine: ServingEngine) -> None:
    body = TEXT | {"max_tokens": 200, "min_tokens": 200, "n": 6, "stream": True, "logprobs": 0}
    with held_forwards(model) as forwards:
        forwards.allow(1)  # of a first token
        with client.stream("POST", "/v1/completions", json=body) as reply:
            events = reply.iter_lines()  # with a name, because it closes the reply when it is freed
            next(events)
            metrics = samples(client.get("/metrics").text)
    running = metrics["lorakit_engine_decoding", ()] + metrics["lorakit_engine_prefilling", ()]
    assert 1 <= running == metrics["vllm:num_requests_running", ("tiny",)] <= 4  # the engine's rows
    assert metrics["vllm:num_requests_waiting", ("tiny",)] >= 1
    assert metrics["lorakit_engine_kv_bytes", ()] > 0
    assert metrics["lorakit_engine_failed_steps_total", ()] == 0
    assert metrics["lorakit_engine_preemptions_total", ()] == 0
    info = [labels for name, labels in metrics if name == "vllm:lora_requests_info"]
    assert info == [("2", "a", "")]
    wait_until(lambda: engine.counts()["decoding"] + engine.counts()["waiting"] == 0)


def test_every_metric_is_in_the_table_of_the_docs_and_says_what_it_is(client: httpx.Client) -> None:
    client.post("/v1/completions", json=TEXT)
    text = client.get("/metrics").text
    table = (ROOT / "docs" / "serving.md").read_text().split("| lorakit's, per adapter |")[1].split("\n\n")[0]
    documented = set(re.findall(r"`((?:lorakit_|vllm:)\w+)", table))
    names = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    assert documented == {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
    helps = re.findall(r"^# HELP \S+ (.*)$", text, re.MULTILINE)
    assert [one for one in helps if not re.fullmatch(r"(Counts|Measures|Shows|Names) .*\.", one)] == []


def test_cached_prompt_tokens_and_adapters_are_counted(base: Path, tmp_path: Path) -> None:
    model = lorakit.load(base, dtype="float32")
    engine = ServingEngine(model)
    pool = AdapterPool(model, max_resident=1)
    for name in "ab":
        pool.load(name, make_patch(base, tmp_path / name))
    body = {"model": "a", "prompt": list(range(5, 45)), "n": 2, "max_tokens": 1}
    with serving(OpenAIServer(model, engine, "tiny", pool=pool).app) as address:
        usages = [patient.post(f"{address}/v1/completions", json=body).json()["usage"] for _ in range(2)]
        metrics = samples(patient.get(f"{address}/metrics").text)
    engine.close()
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 32]
    assert metrics["lorakit_cached_prompt_tokens_total", ("a",)] == 32
    assert metrics["vllm:prompt_tokens_cached_total", ("tiny",)] == 32
    assert metrics["lorakit_prompt_tokens_total", ("a",)] == 80
    assert (metrics["lorakit_adapters", ()], metrics["lorakit_adapters_in_memory", ()]) == (2, 1)


def test_changes_over_http_are_events_as_those_of_a_folder_are(base: Path, tmp_path: Path) -> None:
    model = lorakit.load(base, dtype="float32")
    engine = ServingEngine(model)
    digests = [read_patch(make_patch(base, tmp_path / name, seed=seed)).identity for seed, name in enumerate("ab")]
    lines: Lines = []

    def log(line: Mapping[str, Any]) -> None:
        lines.append(dict(line))

    with serving(OpenAIServer(model, engine, "tiny", admin_key="k", adapter_root=tmp_path, log=log).app) as address:
        headers = {"Authorization": "Bearer k"}
        for folder in "ab":
            body = {"lora_name": "x", "lora_path": folder, "load_inplace": True}
            patient.post(f"{address}/v1/load_lora_adapter", json=body, headers=headers)
        patient.post(f"{address}/v1/unload_lora_adapter", json={"lora_name": "x"}, headers=headers)
        patient.post(f"{address}/v1/unload_lora_adapter", json={"lora_name": "x"}, headers=headers)
        logged(lines, 7)
    engine.close()
    assert [line for line in lines if "event" in line] == [
        {"event": "adapter loaded", "adapter": "x", "digest": digests[0]},
        {"event": "adapter replaced", "adapter": "x", "digest": digests[1]},
        {"event": "adapter unloaded", "adapter": "x", "digest": digests[1]},
    ]
    assert (lines[-1]["status"], lines[-1]["model"], lines[-1]["error"]) == (
        404,
        "x",
        "not_found: lora_name: no adapter is called",
    )


def test_a_client_that_fills_its_share_of_the_queue_keeps_nobody_out(model: AdaptedModel) -> None:
    engine = ServingEngine(model, max_rows=1, max_queue=8)
    body = TEXT | {"n": 4}
    greedy, other = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    with serving(OpenAIServer(model, engine, "tiny", ["one", "two"]).app) as address:
        url = f"{address}/v1/completions"
        with held_forwards(model):
            engine.submit([5], None, SamplingSettings(max_tokens=1), None, "key 2")  # it is computed
            wait_until(lambda: engine.counts()["prefilling"] == 1)
            sent = threading.Thread(target=patient.post, args=(url,), kwargs={"json": body, "headers": greedy})
            sent.start()
            wait_until(lambda: engine.counts()["waiting"] == 4)
            refused = patient.post(url, json=body | {"n": 1}, headers=greedy)
            answers: list[httpx.Response] = []
            thread = threading.Thread(
                target=lambda: answers.append(patient.post(url, json=body | {"n": 1}, headers=other))
            )
            thread.start()
            wait_until(lambda: engine.counts()["waiting"] == 5)
        thread.join()
        sent.join()
    engine.close()
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert answers[0].status_code == 200


def test_the_time_to_wait_is_that_of_the_last_answers_over_those_under_way(model: AdaptedModel) -> None:
    metrics = RequestMetrics("tiny", AdapterPool(model), dict, {})
    for _ in range(40):
        metrics.observe(RequestRecord("", "POST", "/", True, 0.0, num_prompt_tokens=1, seconds=90.0))
    seconds = []
    for number in range(4):
        metrics.under_way.add(RequestRecord(str(number), "POST", "/", True, 0.0))
        seconds.append(metrics.retry_seconds())
    assert seconds == [60, 45, 30, 23]


def test_two_servers_in_one_process_count_their_own(
    model: AdaptedModel, engine: ServingEngine, client: httpx.Client
) -> None:
    client.post("/v1/completions", json=TEXT)
    with serving(OpenAIServer(model, engine, "tiny").app) as address:
        assert not [name for name, _ in samples(patient.get(f"{address}/metrics").text) if "requests_total" in name]
    assert samples(client.get("/metrics").text)["lorakit_requests_total", ("a", "200")] == 1


def test_adapters_that_come_and_go_leave_no_labels(base: Path, tmp_path: Path) -> None:
    model = lorakit.load(base, dtype="float32")
    engine = ServingEngine(model)
    patch = make_patch(base, tmp_path / "patch")
    with serving(OpenAIServer(model, engine, "tiny").app) as address:
        for number in range(3):
            model.load_adapter(f"x{number}", patch)
            assert patient.post(f"{address}/v1/completions", json=TEXT | {"model": f"x{number}"}).status_code == 200
            model.unload_adapter(f"x{number}")
        after = samples(patient.get(f"{address}/metrics").text)
        model.load_adapter("y", patch)
        body = TEXT | {"model": "y", "max_tokens": 100, "min_tokens": 100, "stream": True}
        with held_forwards(model) as forwards, patient.stream("POST", f"{address}/v1/completions", json=body) as reply:
            model.unload_adapter("y")  # under way; its answer is counted without a name
            forwards.allow(math.inf)
            assert reply.read().endswith(b"data: [DONE]\n\n")
        wait_until(lambda: "lorakit_requests_total" in patient.get(f"{address}/metrics").text)  # after its last byte
        last = samples(patient.get(f"{address}/metrics").text)
    engine.close()
    # a request may be counted after its adapter was unloaded, a moment after its last byte
    assert {labels[0] for name, labels in after if name.startswith("lorakit_") and labels} <= {""}
    assert {labels[0] for name, labels in last if name.startswith("lorakit_") and labels} == {""}
    assert last["lorakit_requests_total", ("", "200")] >= 1


def test_adapters_show_digest_rank_bytes_and_requests(client: httpx.Client, model: AdaptedModel) -> None:
    for name in ("a", "a", "b"):
        client.post("/v1/completions", json=TEXT | {"model": name})
    first, second = client.get("/v1/adapters").json()["data"]
    adapter = model.adapter("a")
    assert adapter is not None
    factors = [slot.factors for slot in adapter.slots.values() if slot.factors is not None]
    assert first == {
        "name": "a", "state": "loaded", "pinned": False, "digest": adapter.identity, "rank": 4, "requests": 2,
        "error": None,
        "bytes": sum(one.A.nbytes + one.B.nbytes for one in factors),
        "prompting": {"raw": False, "system": None, "template_kwargs": {}},
    }  # fmt: skip
    assert (second["name"], second["requests"]) == ("b", 1)
    assert client.get("/v1/models/a").json()["max_model_len"] == 256


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_or_stuck_engine_is_not_healthy_and_its_requests_end(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lorakit.load(base, dtype="float32")
    engine = ServingEngine(model)
    began = threading.Event()
    waits = threading.Event()

    def stuck(*, prefills: bool) -> None:
        began.set()
        waits.wait()
        raise MemoryError

    monkeypatch.setattr(engine._batch, "step", stuck)
    body = TEXT | {"model": "tiny", "stream": True}
    with serving(OpenAIServer(model, engine, "tiny").app) as address:
        assert patient.get(f"{address}/health").status_code == 200
        with patient.stream("POST", f"{address}/v1/completions", json=body) as reply:
            began.wait()
            assert patient.get(f"{address}/health").status_code == 200
            with monkeypatch.context() as patched:
                patched.setattr(app_module, "STUCK_SECONDS", 0.0)  # of any step
                assert patient.get(f"{address}/health").status_code == 503
            waits.set()
            events = [line for line in reply.iter_lines() if line]
        assert json.loads(events[0].removeprefix("data: "))["error"]["type"] == "server_error"
        engine.close()
        assert patient.get(f"{address}/health").status_code == 503
        assert patient.post(f"{address}/v1/completions", json=body).status_code == 503


def test_the_document_describes_every_route_and_field(model: AdaptedModel, engine: ServingEngine) -> None:
    app = OpenAIServer(model, engine, "tiny", admin_key="root").app
    with serving(app) as address, patient.Client(base_url=address) as client:
        document = client.get("/openapi.json").json()
        chat = document["components"]["schemas"]["ChatRequest"]
        for path, operations in document["paths"].items():
            (method,) = operations
            reply = client.request(method, path.replace("{name}", "a"), json={} if method == "post" else None)
            assert reply.status_code == (200 if method == "get" else 401 if "lora" in path else 400), path
        for name in set(chat["properties"]) - {"model", "messages"}:  # what the document allows is known
            body = {"model": "a", "messages": [{"role": "user", "content": "hi"}], name: {"a": "wrong"}}
            reply = client.post("/v1/chat/completions", json={"max_tokens": 1} | body)
            assert f"{name}: not supported" not in reply.text
    assert "/v1/load_lora_adapter" in document["paths"]
    assert chat["required"] == ["model", "messages"]
    temperature = {"type": "number", "minimum": 0, "maximum": 100}
    assert chat["properties"]["temperature"]["anyOf"] == [temperature, {"type": "null"}]


def test_keys_metrics_the_log_and_the_document_follow_from_the_table(
    model: AdaptedModel, engine: ServingEngine, lines: Lines
) -> None:
    server = OpenAIServer(model, engine, "tiny", ["key"], "root", log=lambda line: lines.append(dict(line)))
    with serving(server.app) as address:
        for route in server.routes:
            path = route.path.replace("{name:path}", "tiny")
            num_lines = len(lines)
            status = {
                kind: patient.request(
                    route.method, address + path, headers={"Authorization": f"Bearer {key}"}
                ).status_code
                for kind, key in (("none", "no"), ("api", "key"), ("admin", "root"))
            }
            opens = {kind for kind, one in status.items() if one != 401}
            expected = {"none": {"none", "api", "admin"}, "either": {"api", "admin"}}
            assert opens == expected.get(route.key, {route.key}), route
            refused = 3 - len(opens)
            logged(lines, num_lines + refused + (0 if route.is_quiet else len(opens)))
        document = patient.get(f"{address}/openapi.json", headers={"Authorization": "Bearer key"}).json()
        text = patient.get(f"{address}/metrics", headers={"Authorization": "Bearer key"}).text
    described = [route for route in server.routes if route.path not in PAGE_FILES]
    assert list(document["paths"]) == [route.path.replace(":path", "") for route in described]
    counted = [route for route in server.routes if route.is_counted]
    assert samples(text)["lorakit_requests_total", ("", "400")] == len(counted)  # bodies that are no JSON
    assert samples(text)["lorakit_requests_total", ("", "401")] == 2 * len(counted)


def test_a_full_queue_is_429_with_the_time_to_wait(model: AdaptedModel) -> None:
    engine = ServingEngine(model, max_rows=1, max_queue=16)
    body = TEXT | {"model": "a", "n": 8, "max_tokens": 4}
    with serving(OpenAIServer(model, engine, "tiny").app) as address:
        with held_forwards(model):
            for _ in range(4):
                engine.submit([5], None, SamplingSettings(max_tokens=1))
            reply = patient.post(f"{address}/v1/completions", json=body)
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        error = reply.json()["error"]
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")  # OpenAI's
        assert "requests wait" in error["message"]
        assert patient.post(f"{address}/v1/completions", json=body).status_code == 200
        never = patient.post(f"{address}/v1/completions", json=body | {"prompt": ["hi"] * 2}).json()["error"]
    assert (never["param"], never["message"]) == (
        "prompt", "prompt: 2 prompts of 8 choices; one request may have 8 in all"
    )  # fmt: skip
    engine.close()


def test_usage_counts_cached_tokens_and_each_choice_has_a_seed_of_its_own(model: AdaptedModel) -> None:
    engine = ServingEngine(model, max_rows=4)
    body = {"model": "a", "prompt": list(range(5, 45)), "n": 3, "max_tokens": 6, "temperature": 1.0, "seed": 2**63 - 2}
    with serving(OpenAIServer(model, engine, "tiny").app) as address:
        first, again = (patient.post(f"{address}/v1/completions", json=body).json() for _ in range(2))
        alone = patient.post(f"{address}/v1/completions", json=body | {"n": 1}).json()
    engine.close()
    texts = [choice["text"] for choice in first["choices"]]
    assert len(set(texts)) == 3
    assert [choice["text"] for choice in again["choices"]] == texts
    assert alone["choices"][0]["text"] == texts[0]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 32  # two blocks of 16; the last is computed
