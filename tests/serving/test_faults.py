"""What goes wrong around a server leaves its other answers as they are: disks, files, clients, and its own end."""

import contextlib
import json
import resource
import shutil
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

import lorakit
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.serving.adapter_pool import AdapterPool
from lorakit.serving.app import OpenAIServer
from lorakit.serving.engine import ServingEngine
from tests.helpers import patient
from tests.helpers.http_server import serving, started
from tests.helpers.patches import TENSORS, make_patch
from tests.helpers.serving import wait_until

BODY: Any = {"model": "tiny", "prompt": "hi", "temperature": 0, "max_tokens": 6, "min_tokens": 6}


def ask(address: str, model: str = "tiny") -> httpx.Response:
    return patient.post(f"{address}/v1/completions", json=BODY | {"model": model})


def test_a_full_disk_under_the_log_stops_no_answer_and_is_said_once(base: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with started(base, log=log) as (process, address):
        first = ask(address).json()["choices"]
        wait_until(lambda: "completion_tokens" in log.read_text())
        size, (_, most) = log.stat().st_size, resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size + 100, most))  # the file ends within the next line
        assert [ask(address).json()["choices"] for _ in range(3)] == [first] * 3
        lost = "lorakit_log_lines_lost_total 3.0"
        wait_until(lambda: lost in patient.get(f"{address}/metrics").text)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, most))
        ask(address)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    _, whole_line, cut, last, _ = log.read_text().splitlines()  # the first one says ready, the last one draining
    assert json.loads(whole_line)["status"] == json.loads(last)["status"] == 200
    assert len(cut) == 100
    (said,) = log.with_suffix(".out").read_text().splitlines()
    assert (json.loads(said)["event"], "File too large" in said) == ("the log cannot be written", True)


def test_a_killed_server_starts_again_at_its_port_and_answers_the_same(base: Path, tmp_path: Path) -> None:
    arguments = ("--adapter", f"a={make_patch(base, tmp_path / 'a')}", "--max-adapters", "1", "--pin", "a")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    answers = []
    for number in range(2):
        with started(base, *arguments, log=tmp_path / f"log{number}", port=port) as (process, address):
            answers.append([ask(address, name).json()["choices"] for name in ("tiny", "a")])
            body = BODY | {"max_tokens": 200, "min_tokens": 200, "stream": True}
            with patient.stream("POST", f"{address}/v1/completions", json=body) as reply:
                next(reply.iter_lines())
                process.kill()
            assert process.wait() == -signal.SIGKILL
    assert answers[0] == answers[1]


@pytest.mark.matrix
def test_an_adapter_that_is_cut_while_it_is_read_is_refused_and_the_old_one_stays(
    base: Path, patches: dict[str, Path], tmp_path: Path
) -> None:
    model, python = lorakit.load(base, dtype="float32"), lorakit.load(base, patches, dtype="float32")
    expected = {name: python.generate(["hi"], name, max_new_tokens=6, raw=True)[0] for name in patches}
    shutil.copytree(patches["b"], tmp_path / "b")
    file = tmp_path / "b" / TENSORS
    content, over = file.read_bytes(), threading.Event()
    pool = AdapterPool(model, max_resident=1)
    pool.load("x", patches["a"])
    pool.load("y", tmp_path / "b")  # so that x is on disk, and each of them is read again when it is asked

    def cut_and_mend() -> None:
        while not over.is_set():
            with file.open("r+b") as opened:  # in place, as a writer that is interrupted
                opened.truncate(len(content) // 2)
                time.sleep(0.001)
                opened.seek(0)
                opened.write(content)
            time.sleep(0.003)

    writer = threading.Thread(target=cut_and_mend)
    load = {"lora_name": "x", "lora_path": "b", "load_inplace": True}
    headers, statuses, before = {"Authorization": "Bearer root"}, [], "a"
    with contextlib.closing(ServingEngine(model)) as engine:
        app = OpenAIServer(model, engine, "tiny", (), "root", tmp_path, pool=pool).app
        with serving(app) as address:
            writer.start()
            while len(set(statuses)) < 2 or len(statuses) < 20:
                reply = patient.post(f"{address}/v1/load_lora_adapter", json=load, headers=headers)
                statuses.append(reply.status_code)
                before = "b" if reply.status_code == 200 else before
                other = ask(address, "y")  # which is read from the file that is cut
                assert other.status_code == 503 or other.json()["choices"][0]["text"] == expected["b"]
                if before == "a":  # whose files are sound
                    assert ask(address, "x").json()["choices"][0]["text"] == expected["a"]
            over.set()
            writer.join()
            assert {ask(address, name).json()["choices"][0]["text"] for name in "xy"} == {expected["b"]}
    assert set(statuses) == {200, 400}


def test_clients_that_leave_midway_leave_nothing_behind(model: AdaptedModel) -> None:
    with contextlib.closing(ServingEngine(model, max_rows=4, max_positions=2000)) as engine:
        pool = AdapterPool(model)
        with serving(OpenAIServer(model, engine, "tiny", pool=pool).app) as address:
            start, threads = engine.counts(), threading.active_count()

            def leave(number: int) -> None:
                body = BODY | {"model": ("tiny", "a", "b")[number % 3], "max_tokens": 200, "min_tokens": 200}
                with patient.stream("POST", f"{address}/v1/completions", json=body | {"stream": True}) as reply:
                    lines = reply.iter_lines()
                    for _ in range(number % 4):  # some leave before their first token
                        next(lines)

            for round_number in range(1, 4):
                clients = [threading.Thread(target=leave, args=(number,)) for number in range(20)]
                for client in clients:
                    client.start()
                for client in clients:
                    client.join()
                wait_until(lambda ended=20 * round_number: engine.finished.total() == ended)  # type: ignore[misc]
                wait_until(lambda: engine.counts() | {"prefix_bytes": 0} == start)
            metrics = patient.get(f"{address}/metrics").text
            assert 'running_lora_adapters="",waiting_lora_adapters=""' in metrics
            assert sum(engine.finished[reason] for reason in ("cancelled", "length")) == 60
            assert ask(address).status_code == 200
    wait_until(lambda: threading.active_count() <= threads)
