"""Clients that are slow, silent, hostile or merely odd cost a bounded amount, and others are answered meanwhile."""

import contextlib
import http.client
import json
import os
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lorakit
from lorakit.cli.serve import LOOPBACK
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.serving import connections, requests
from lorakit.serving.app import OpenAIServer
from lorakit.serving.engine import ServingEngine
from lorakit.serving.request_log import LineLog
from tests.helpers import patient
from tests.helpers.http_server import listening, serving, started
from tests.helpers.patches import make_patch
from tests.helpers.serving import wait_until

TEXT: Any = {"model": "tiny", "prompt": "hi", "max_tokens": 2, "min_tokens": 2}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


def connected(address: str) -> socket.socket:
    host, _, port = address.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)))
    connection.settimeout(60)
    return connection


@pytest.fixture
def address(model: AdaptedModel, engine: ServingEngine) -> Iterator[str]:
    with serving(OpenAIServer(model, engine, "tiny").app) as running:
        yield running


@pytest.mark.parametrize(
    "sent", [b"", HEAD, HEAD + b"Content-Length: 9\r\n\r\n{", HEAD + b"Transfer-Encoding: chunked\r\n\r\n"]
)
def test_a_request_that_never_ends_is_closed(address: str, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(connections, "READ_SECONDS", 0.2)
    with connected(address) as connection:
        connection.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1000) == b""
    assert patient.post(f"{address}/v1/completions", json=TEXT).status_code == 200


def test_half_a_request_that_came_with_another_one_is_closed(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "READ_SECONDS", 0.2)
    with connected(address) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" + HEAD + b"Content-Length: 9\r\n\r\n{")
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1000):
                received += part
    assert received.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("headers", [{"Host": "[::1"}, {"Host": "localhost", "Origin": "http://["}])
def test_half_an_address_in_a_header_is_refused_by_name(
    model: AdaptedModel, engine: ServingEngine, headers: dict[str, str]
) -> None:
    with serving(OpenAIServer(model, engine, "tiny", allowed_hosts=["localhost"]).app) as running:
        reply = patient.get(f"{running}/version", headers=headers)
    assert (reply.status_code, "is no address" in reply.text) == (400, True)


def test_tokens_are_counted_before_they_are_turned_into_text(address: str, model: AdaptedModel) -> None:
    fits = patient.post(f"{address}/detokenize", json={"tokens": [5] * 64})
    reply = patient.post(f"{address}/detokenize", json={"tokens": [5] * 100_000})
    assert (fits.status_code, reply.status_code) == (200, 400)
    reply = patient.post(f"{address}/tokenize", json={"messages": [{"role": "user", "content": "a" * 500_000}]})
    assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_a_body_of_many_lists_is_refused_before_they_take_memory(address: str) -> None:
    reply = patient.post(f"{address}/v1/completions", json=TEXT | {"metadata": [[]] * 200_001})
    assert "brackets" in reply.json()["error"]["message"]


def test_a_body_of_many_fields_is_refused_before_each_is_looked_at(address: str) -> None:
    reply = patient.post(f"{address}/v1/completions", json=TEXT | {f"field{number}": 1 for number in range(1000)})
    assert "no request has more than" in reply.json()["error"]["message"]


def test_a_complete_request_may_take_as_long_as_its_answer(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "READ_SECONDS", 0.2)
    body = TEXT | {"max_tokens": 200, "min_tokens": 200, "n": 4}  # seconds of work
    with contextlib.closing(http.client.HTTPConnection(address.removeprefix("http://"))) as connection:
        for _ in range(2):  # the second one on a connection that has been open for longer
            connection.request("POST", "/v1/completions", json.dumps(body))
            assert connection.getresponse().read().count(b'"finish_reason": "length"') == 4


def test_half_a_request_does_not_hold_the_end(base: Path, tmp_path: Path) -> None:
    with started(base, log=tmp_path / "log") as (process, address), connected(address) as half:
        half.sendall(HEAD + b"Content-Length: 9\r\n\r\n{")
        wait_until(lambda: patient.get(f"{address}/health").status_code == 200)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0


def test_the_kernel_ends_a_connection_whose_client_reads_nothing() -> None:
    with listening() as opened, socket.create_connection(opened.getsockname()):
        accepted, _ = opened.accept()
        with accepted:
            timeout = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert timeout == connections.SEND_SECONDS * 1000


def test_more_connections_than_files_are_closed_and_others_are_answered(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "max_connections", lambda: 5)
    with contextlib.ExitStack() as silent:
        opened = [silent.enter_context(connected(address)) for _ in range(20)]
        for connection in opened[5:]:
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
    wait_until(lambda: patient.post(f"{address}/v1/completions", json=TEXT).status_code == 200)


def test_a_burst_of_connections_takes_no_more_files_than_there_are(base: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with started(base, log=log) as (process, address), contextlib.ExitStack() as silent:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (128, 128))
        process.send_signal(signal.SIGSTOP)  # so that it finds all of them at once
        for _ in range(300):
            silent.enter_context(connected(address))
        process.send_signal(signal.SIGCONT)
        silent.close()
        wait_until(lambda: patient.get(f"{address}/health").status_code == 200)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    assert [json.loads(line)["event"] for line in log.read_text().splitlines()] == ["ready", "draining"]


def test_a_body_is_refused_by_its_length_before_it_is_sent(address: str) -> None:
    with connected(address) as connection:
        connection.sendall(HEAD + b"Content-Length: 1000000000000000000\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")


def test_many_small_chunks_are_read_a_few_at_a_time(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    usual = connections.H11Protocol.data_received

    def counted(protocol: Any, data: bytes) -> None:
        sizes.append(len(data))
        usual(protocol, data)

    monkeypatch.setattr(connections.H11Protocol, "data_received", counted)
    body = json.dumps(TEXT).encode() + b" " * 20_000
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    with connected(address) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + chunks)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    assert sum(sizes) > len(chunks)
    assert max(sizes) <= 8192  # between which others are answered


def test_bodies_together_are_bounded_and_their_memory_is_counted_back(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MAX_BODIES_BYTES", 1000)
    with connected(address) as other:
        other.sendall(HEAD + b"Content-Length: 2000\r\n\r\n" + b" " * 990)
        wait_until(lambda: patient.post(f"{address}/v1/completions", json=TEXT).status_code == 503)
    wait_until(lambda: patient.post(f"{address}/v1/completions", json=TEXT).status_code == 200)


def test_a_client_that_leaves_while_it_sends_is_499_in_one_line(model: AdaptedModel, engine: ServingEngine) -> None:
    lines: list[dict[str, Any]] = []
    with serving(OpenAIServer(model, engine, "tiny", log=lambda line: lines.append(dict(line))).app) as address:
        with connected(address) as connection:
            connection.sendall(HEAD + b"Content-Length: 9\r\n\r\n{")
        wait_until(lambda: bool(lines))
    assert [line["status"] for line in lines] == [499]


def test_what_a_client_wrote_takes_little_of_the_log(model: AdaptedModel, engine: ServingEngine) -> None:
    lines: list[dict[str, Any]] = []
    with serving(OpenAIServer(model, engine, "tiny", log=lambda line: lines.append(dict(line))).app) as address:
        assert patient.post(f"{address}/v1/completions", json=TEXT | {"model": "x" * 1_000_000}).status_code == 404
        assert patient.get(f"{address}/{'y' * 10_000}").status_code == 404
        wait_until(lambda: len(lines) == 2)
    assert max(len(json.dumps(line)) for line in lines) < 1000


def test_a_log_that_nobody_reads_stops_nothing_and_loses_counted_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    log = LineLog(writing)
    line = {"event": "x" * 1000}
    for _ in range(11_000):  # more than the pipe and the queue hold
        log(line)
    lost = log.num_lost
    assert lost > 0
    received = bytearray()
    reader = threading.Thread(target=lambda: received.extend(iter_all(reading)))
    reader.start()
    log.close()
    os.close(writing)
    reader.join()
    os.close(reading)
    assert len(received.splitlines()) == 11_000 - lost


def iter_all(descriptor: int) -> bytes:
    parts = []
    while part := os.read(descriptor, 1 << 16):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize(
    ("header", "status"),
    [("Bearer key1", 200), ("bearer key1", 200), ("BEARER  key1", 200), ("key1", 401), ("Basic key1", 401), ("", 401)],
)
def test_a_key_is_a_bearer_token_in_any_case(
    model: AdaptedModel, engine: ServingEngine, header: str, status: int
) -> None:
    with serving(OpenAIServer(model, engine, "tiny", ["key1", "key2"]).app) as address:
        assert patient.get(f"{address}/v1/models", headers={"Authorization": header}).status_code == status


@pytest.mark.parametrize("keys", [[], ["key1", "key2"]])
def test_the_spelling_of_a_header_makes_no_other_client(
    model: AdaptedModel, engine: ServingEngine, keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = []
    submit = engine.submit

    def noted(*arguments: Any) -> Any:
        clients.append(arguments[-1])
        return submit(*arguments)

    monkeypatch.setattr(engine, "submit", noted)
    with serving(OpenAIServer(model, engine, "tiny", keys).app) as address:
        for header in ("Bearer key1", "bearer key1", "Bearer  key1", "Bearer key2"):
            reply = patient.post(f"{address}/v1/completions", json=TEXT, headers={"Authorization": header})
            assert reply.status_code == 200
    assert clients == (["key 0"] * 3 + ["key 1"] if keys else ["127.0.0.1"] * 4)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:8000"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "Named.Example"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "169.254.169.254"}, 403),
        ({"Host": "localhost:8000", "Origin": "http://localhost:8000"}, 200),
        ({"Host": "localhost:8000", "Origin": "http://evil.example"}, 403),
        ({"Host": "localhost:8000", "Origin": "http://localhost:9999"}, 403),
        ({"Host": "localhost:8000", "Origin": "null"}, 403),
    ],
)
def test_a_page_of_another_host_cannot_use_a_server_without_keys(
    model: AdaptedModel, engine: ServingEngine, headers: dict[str, str], status: int
) -> None:
    app = OpenAIServer(model, engine, "tiny", allowed_hosts=(*LOOPBACK, "named.example")).app
    with serving(app) as address:
        assert patient.post(f"{address}/v1/completions", json=TEXT, headers=headers).status_code == status


def test_a_request_that_two_programs_read_differently_is_refused_and_nothing_follows(address: str) -> None:
    with connected(address) as connection:
        both = HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        connection.sendall(both + b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        reply = b"".join(iter(lambda: connection.recv(1000), b""))
    assert reply.startswith(b"HTTP/1.1 400")
    assert reply.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt": "a" * 1_000_000}, "at least 3906 tokens, and 256 fit"),
        ({"stop": "x" * 1001}, "of up to 1000 characters each"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "up to 1024 token ids"),
        ({"logprobs": 21}, "logprobs: up to 20 at each token (--max-logprobs), got 21"),
        ({"response_format": {"type": "regex", "pattern": "a" * 65_537}}, "at most 65536 characters"),
        (
            {
                "response_format": {"type": "json_schema", "json_schema": {"schema": {"x": "a" * 65_537}}},
                "min_tokens": 0,
            },
            "up to 65536 are compiled",
        ),
        ({"prompt": ["hi"] * 2000}, "one request may have 1024 in all"),
    ],
)
def test_what_would_take_long_is_refused_before_it_is_begun(address: str, change: dict[str, Any], said: str) -> None:
    error = patient.post(f"{address}/v1/completions", json=TEXT | change).json()["error"]
    assert said in error["message"]
    assert error["param"] == next(iter(change))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt": [2**63]}, "prompt: a text, token ids"),
        ({"logit_bias": {"9" * 5000: 1}}, "token ids to numbers"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 2**64}}}},
            "exact up to 2**53",
        ),
    ],
)
def test_a_number_that_nothing_here_can_hold_is_refused_by_name(
    address: str, change: dict[str, Any], said: str
) -> None:
    reply = patient.post(f"{address}/v1/completions", json=TEXT | {"min_tokens": None} | change)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, next(iter(change)))
    assert said in reply.json()["error"]["message"]


def test_a_chat_of_more_messages_than_tokens_is_too_long(address: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": ""}] * 300}
    error = patient.post(f"{address}/v1/chat/completions", json=body).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize("path", ["v1/chat/completions", "tokenize"])
@pytest.mark.parametrize(
    ("tool", "call", "param"),
    [
        ({"parameters": {"enum": list(range(300))}}, {}, "tools"),
        ({"parameters": {"enum": ["a" * 70_000]}}, {}, "tools"),
        ({"parameters": {"properties": {f"key{number}": True for number in range(300)}}}, {}, "tools"),
        ({"description": "a" * 70_000}, {}, "tools"),
        ({}, {"name": "a" * 70_000}, "messages"),
        ({}, {"arguments": json.dumps({"key": "a" * 70_000})}, "messages"),
    ],
)
def test_tools_and_calls_are_counted_before_they_are_rendered(
    address: str, monkeypatch: pytest.MonkeyPatch, path: str, tool: Any, call: Any, param: str
) -> None:
    rendered: list[str] = []
    monkeypatch.setattr("lorakit.serving.completion_routes.chat_ids", lambda *texts, **options: rendered.append(path))
    calls = [{"function": {"name": "f", "arguments": "{}"} | call}]
    body = {
        "model": "tiny", "tools": [{"type": "function", "function": {"name": "f"} | tool}],
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": calls}],
    }  # fmt: skip
    error = patient.post(f"{address}/{path}", json=body).json()["error"]
    assert (error["code"], error["param"], rendered) == ("context_length_exceeded", param, [])


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("completions", {"prompt": [5] * 300}, "prompt"),
        ("completions", {"max_tokens": 300}, "max_tokens"),
        ("chat/completions", {"max_completion_tokens": 300}, "max_completion_tokens"),
        ("embeddings", {"input": [5] * 300}, None),
    ],
)
def test_a_request_that_does_not_fit_has_openais_code(
    address: str, path: str, change: dict[str, Any], param: str | None
) -> None:
    field: Any = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    body = {"model": "tiny", **(field if path != "embeddings" else {}), **change}
    error = patient.post(f"{address}/v1/{path}", json=body).json()["error"]
    if path != "embeddings" or "embeddings" not in error["message"]:  # of a base that has none
        assert error["code"] == "context_length_exceeded", error
        assert error["param"] == param
        assert path == "embeddings" or "This model's maximum context length is 256 tokens" in error["message"]


def test_a_key_that_is_there_twice_is_refused(address: str) -> None:
    content = b'{"model": "tiny", "prompt": "hi", "model": "a"}'
    reply = patient.post(f"{address}/v1/completions", content=content)
    assert reply.status_code == 400
    assert "key 'model' appears twice" in reply.json()["error"]["message"]


def test_a_stop_that_is_a_special_token_ends_the_answer(address: str, model: AdaptedModel) -> None:
    tokenizer: Any = model.tokenizer
    special = next(text for text in tokenizer.all_special_tokens if text != tokenizer.eos_token)
    number = tokenizer.convert_tokens_to_ids(special)
    body = TEXT | {"temperature": 0, "min_tokens": 0, "max_tokens": 4, "logit_bias": {str(number): 100}}
    (choice,) = patient.post(f"{address}/v1/completions", json=body | {"stop": special}).json()["choices"]
    assert (choice["finish_reason"], choice["text"]) == ("stop", "")
    error = patient.post(f"{address}/v1/completions", json=body | {"stop": f"{special} x"}).json()["error"]
    assert "give it alone" in error["message"]


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31m", "x" * 129, "", " ", "a ", "a\udc80"])
def test_a_name_that_cannot_be_shown_is_refused(base: Path, tmp_path: Path, name: str) -> None:
    from lorakit.serving.adapter_pool import AdapterPool

    pool = AdapterPool(lorakit.load(base, dtype="float32"))
    with pytest.raises(lorakit.errors.PatchError, match="characters that can be printed"):
        pool.load(name, make_patch(base, tmp_path / "a"))


def test_a_folder_whose_name_is_no_text_breaks_no_listing(base: Path, tmp_path: Path) -> None:
    patch = make_patch(base, tmp_path / "patches" / "good")
    os.rename(make_patch(base, tmp_path / "other"), os.fsencode(patch.parent) + b"/bad\xff")
    with started(base, "--adapters-dir", patch.parent, log=tmp_path / "log") as (process, address):
        states = {one["name"]: one["state"] for one in patient.get(f"{address}/v1/adapters").json()["data"]}
        assert states == {"good": "loaded", "bad\\udcff": "failed"}
        assert patient.post(f"{address}/v1/completions", json=TEXT | {"model": "nobody"}).status_code == 404
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0


def test_a_link_inside_of_a_patch_leads_nowhere(base: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    patch = make_patch(base, root / "a")
    (tmp_path / "secret.json").write_text('{"peft_type": "TOPSECRET"}')
    (patch / "adapter_config.json").unlink()
    (patch / "adapter_config.json").symlink_to(tmp_path / "secret.json")
    model = lorakit.load(base, dtype="float32")
    with (
        contextlib.closing(ServingEngine(model)) as engine,
        serving(OpenAIServer(model, engine, "tiny", (), "root", root).app) as address,
    ):
        (root / "loop").symlink_to("loop")
        for path, status in (("a", 403), ("b", 400), (".", 400), ("x" * 5000, 400), ("loop", 400)):
            body = {"lora_name": "x", "lora_path": path}
            headers = {"Authorization": "Bearer root"}
            reply = patient.post(f"{address}/v1/load_lora_adapter", json=body, headers=headers)
            assert reply.status_code == status
            assert "TOPSECRET" not in reply.text
            assert str(root) not in reply.text


def test_what_is_no_http_is_an_event_of_the_log(base: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with started(base, log=log) as (process, address):
        with connected(address) as connection:
            connection.sendall(b"\x16\x03\x01 no http\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 400")
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    assert events == ["ready", "Invalid HTTP request received.", "draining"]
