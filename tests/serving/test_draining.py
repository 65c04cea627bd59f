"""A server that gets a signal finishes the answers that have begun, refuses the rest with 503, and ends."""

import json
import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx
import uvicorn
import yaml

from lorakit.cli.main import build_parser
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.serving.app import DrainingServer, OpenAIServer
from lorakit.serving.connections import TimedProtocol
from lorakit.serving.engine import ServingEngine
from tests.helpers import patient
from tests.helpers.fork_server import ROOT
from tests.helpers.http_server import listening
from tests.helpers.serving import held_forwards, wait_until

LONG: Any = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 20, "min_tokens": 20, "logprobs": 0}
STREAMED: Any = LONG | {"stream": True}
Lines = list[dict[str, Any]]


@contextmanager
def draining_server(
    model: AdaptedModel, engine: ServingEngine, lines: Lines, seconds: float
) -> Iterator[tuple[DrainingServer, str]]:
    """Run a server in a thread, where it gets signals by a call; yield it and its address when it has ended or not."""
    app = OpenAIServer(model, engine, "tiny", log=lambda line: lines.append(dict(line)))
    bound = listening()
    config = uvicorn.Config(app.app, http=TimedProtocol, log_level="critical")
    server = DrainingServer(config, partial(app.drain, seconds))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    address = f"http://127.0.0.1:{bound.getsockname()[1]}"
    thread.start()
    wait_until(lambda: server.started)
    yield server, address
    thread.join()


def events(reply: httpx.Response) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in reply.iter_lines() if line)


def test_a_signal_finishes_what_has_begun_and_refuses_the_rest(model: AdaptedModel) -> None:
    engine = ServingEngine(model, max_rows=1)
    lines: Lines = []
    waiting: list[httpx.Response] = []
    with draining_server(model, engine, lines, 600.0) as (server, address), held_forwards(model) as forwards:
        send = partial(patient.post, f"{address}/v1/completions")
        threads = [
            threading.Thread(target=lambda body=body: waiting.append(send(json=body))) for body in (LONG, STREAMED)
        ]
        forwards.allow(1)  # of a first token
        with patient.stream("POST", f"{address}/v1/completions", json=STREAMED) as reply:
            answer = events(reply)
            first = next(answer)
            for thread in threads:
                thread.start()
            wait_until(lambda: engine.counts()["waiting"] == 2)
            server.handle_exit(signal.SIGTERM, None)
            wait_until(lambda: any(line.get("event") == "draining" for line in lines))

            health = patient.get(f"{address}/health")
            new = send(json=LONG)
            metrics = patient.get(f"{address}/metrics")
            forwards.allow(math.inf)
            rest = list(answer)
            for thread in threads:
                thread.join()
    assert (health.status_code, health.headers["retry-after"]) == (503, "1")
    assert (new.status_code, new.headers["retry-after"]) == (503, "1")
    assert new.json()["error"]["message"] == "the server is ending; ask again"
    assert metrics.status_code == 200  # what only reads goes on

    assert len([first, *rest]) == 22  # 20 tokens, the reason and the end
    assert rest[-1] == "[DONE]"
    refused, streamed = sorted(waiting, key=lambda one: -one.status_code)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    (event,) = [line for line in streamed.text.splitlines() if line]  # its status was sent before it waited
    assert json.loads(event.removeprefix("data: "))["error"]["type"] == "server_error"
    assert next(line for line in lines if "event" in line) == {"event": "draining", "running": 1, "waiting": 2}
    assert engine.finished == {"length": 1, "cancelled": 2}
    engine.close()


def test_what_takes_longer_is_cut_with_an_error(model: AdaptedModel) -> None:
    engine = ServingEngine(model, max_rows=1)
    lines: Lines = []
    with draining_server(model, engine, lines, 0.0) as (server, address), held_forwards(model) as forwards:
        forwards.allow(1)
        with patient.stream("POST", f"{address}/v1/completions", json=STREAMED) as reply:
            answer = events(reply)
            next(answer)
            server.handle_exit(signal.SIGTERM, None)
            wait_until(lambda: engine._closed)
            forwards.allow(math.inf)
            rest = list(answer)
    assert json.loads(rest[-1])["error"]["message"] == "the server ended before the answer; ask again"
    assert [(line["status"], line["error"]) for line in lines if "status" in line] == [
        (503, "the server ended before the answer; ask again")
    ]


def test_a_pod_has_longer_than_a_server_takes_to_end() -> None:
    deployment, service = yaml.safe_load_all((ROOT / "docs" / "deployment.yaml").read_text())
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    default = build_parser().parse_args(["serve", "builtin:tiny"]).drain_timeout
    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= default + 15
