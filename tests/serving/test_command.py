"""`lorakit serve` starts, answers, and ends at a signal."""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorakit.cli import main
from lorakit.serving.connections import bound_socket
from tests.helpers import patient
from tests.helpers.http_server import listening, started
from tests.helpers.patches import make_patch
from tests.helpers.serving import wait_until

LONG: Any = {
    "model": "tiny", "prompt": ["hi"] * 3, "max_tokens": 200, "min_tokens": 200, "n": 16, "stream": True,  # seconds of work
    "stream_options": {"include_usage": True},
}  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.matrix)])
def test_a_signal_lets_answers_under_way_finish_and_the_command_succeeds(
    base: Path, tmp_path: Path, number: signal.Signals
) -> None:
    patch = make_patch(base, tmp_path / "patch")
    log = tmp_path / "log"
    with started(base, "--adapter", f"a={patch}", log=log) as (process, address):
        with patient.stream("POST", f"{address}/v1/completions", json=LONG | {"model": "a"}) as reply:
            lines = (line.removeprefix("data: ") for line in reply.iter_lines() if line)
            next(lines)
            process.send_signal(number)
            rest = list(lines)
        assert process.wait() == 0
    assert rest[-1] == "[DONE]"
    assert json.loads(rest[-2])["usage"]["completion_tokens"] == 3 * 16 * 200
    lines = [json.loads(line) for line in log.read_text().splitlines()]  # nothing else, such as a traceback
    assert [line.get("event") for line in lines] == ["adapter loaded", "ready", "draining", None]
    assert (lines[1]["url"], lines[1]["models"]) == (f"{address}/v1", ["tiny", "a"])
    assert (lines[2]["running"], lines[2]["waiting"]) == (1, 0)
    assert lines[3]["completion_tokens"] == 3 * 16 * 200


def test_a_second_signal_ends_the_command_at_once(base: Path, tmp_path: Path) -> None:
    with started(base, log=tmp_path / "log") as (process, address):
        body = LONG | {"prompt": ["hi"] * 60, "n": 16}  # minutes of work
        with patient.stream("POST", f"{address}/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: patient.get(f"{address}/health").status_code == 503)  # the first one was handled
            process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
        assert process.wait() == -signal.SIGTERM


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--adapter", "tiny=x", "--name", "tiny"], "--adapter tiny: is the base's name too"),
        (["--adapter", " =x"], "--adapter: a name has 1 to 128 characters"),
        (["--adapter", "a=nowhere"], "nowhere: no such folder"),
        (["--host", "0.0.0.0", "--adapter-root", "."], "--adapter-root: goes with --admin-key"),
        (["--adapters-dir", "nowhere"], "--adapters-dir: no folder"),
        (["--api-key", "k", "--admin-key", "k"], "--admin-key: is also an API key"),
        (["--api-key", ""], "a key is empty or has spaces"),
        (["--api-key", "two words"], "a key is empty or has spaces"),
        (["--api-key", "k", "--allowed-host", "x"], "--allowed-host: only without keys"),
        (["--host", "0.0.0.0", "--allowed-host", "x"], "--allowed-host: only without keys"),
        (["--api-key-file", "nowhere"], "--api-key-file nowhere: cannot be read"),
        (["--pin", "a"], "--pin: goes with --max-adapters"),
        (
            ["--adapters-dir", ".", "--max-adapters", "1", "--pin", "a", "--pin", "b"],
            "--pin: 2 adapters, and --max-adapters is 1",
        ),
        (["--max-adapters", "1"], "--max-adapters: there is no adapter"),
        (["--admin-key", "root"], "--admin-key: there is no adapter"),
        (["--allowed-host", "http://x:80"], "--allowed-host http://x:80: a name alone"),
        (["--allowed-host", "x:80"], "--allowed-host x:80: a name alone"),
        (["--allowed-host", "*"], "--allowed-host *: a name alone"),
        (["--host", "nohost.invalid"], "--host nohost.invalid --port 8000:"),
        (["--drain-timeout", "-1"], "--drain-timeout: seconds from 0, got -1.0"),
        (["--port", "0", "--kv-positions", "10"], "keys and values of 10 tokens"),
        (["--kv-memory", "0"], "--kv-memory: gigabytes above 0, got 0.0"),
        (["--kv-memory", "inf"], "--kv-memory: gigabytes above 0, got inf"),
        (["--port", "0", "--kv-memory", "1e-7"], "keys and values of 0 tokens of this base"),
    ],
)
def test_what_cannot_be_served_is_said(
    base: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(base), *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("port", ["-1", "65536", "http"])
def test_a_port_that_cannot_be_is_refused_before_the_base_is_loaded(
    port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "nowhere", "--port", port])
    (line,) = capsys.readouterr().err.splitlines()
    said = f"argument --port: a port from 0 to 65535 expected (0: any free one), got '{port}'"
    assert line == f"lorakit serve: {said}; `lorakit serve --help` explains it"


def test_a_folder_is_named_by_its_last_part(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", f"{base}/", "--adapter", f"{base.name}=patch"]) == 2
    assert f"--adapter {base.name}: is the base's name too" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\n \n", "has no key"),
        (b"one\ntwo three\n", "a key is empty or has spaces"),
        (b"\xff", "cannot be read"),
        (b"one\nroot\n", "--admin-key: is also an API key"),
    ],
)
def test_a_file_of_keys_that_would_open_the_server_is_refused(
    base: Path, tmp_path: Path, content: bytes, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys").write_bytes(content)
    assert main(["serve", str(base), "--api-key-file", str(tmp_path / "keys"), "--admin-key", "root"]) == 2
    assert said in capsys.readouterr().err


def test_a_port_that_is_taken_is_named_before_the_base_is_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "nowhere", "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert error == f"lorakit serve: port {port} is taken by another program; choose another with --port\n"


def test_nobody_is_answered_before_everything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with bound_socket("127.0.0.1", 0) as bound, pytest.raises(ConnectionRefusedError):
        socket.create_connection(bound.getsockname())


FREEZES = """
import gc, json, os, sys, threading
from lorakit.cli import main

def end():
    for line in log:
        if json.loads(line).get("event") == "ready":
            print(gc.get_freeze_count() > 100_000, flush=True)
            os._exit(0)

log, written = (os.fdopen(end, mode) for end, mode in zip(os.pipe(), "rw"))
os.dup2(written.fileno(), 2)
threading.Thread(target=end, daemon=True).start()
main(["serve", "builtin:tiny", "--port", "0"])
"""


@pytest.mark.matrix
def test_collections_do_not_go_through_what_was_there_at_the_start() -> None:
    done = subprocess.run([sys.executable, "-c", FREEZES], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "True\n"


def test_a_patch_of_another_base_is_told_the_base_as_it_was_written(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    patch = make_patch(base, tmp_path / "patch")
    assert main(["serve", "builtin:tiny", "--port", "0", "--adapter", f"a={patch}"]) == 2
    assert "patch: does not fit builtin:tiny (" in capsys.readouterr().err


def test_keys_of_a_file_and_a_watched_folder_are_served(base: Path, tmp_path: Path) -> None:
    make_patch(base, tmp_path / "patches" / "one")
    (tmp_path / "keys").write_text("first\n\nsecond\n")
    arguments = ["--api-key-file", tmp_path / "keys", "--api-key", "third", "--adapters-dir", tmp_path / "patches"]
    arguments += ["--max-adapters", "1", "--pin", "one"]
    log = tmp_path / "log"
    with started(base, *arguments, "--log-prompts", log=log) as (process, address):
        statuses = {
            key: patient.get(f"{address}/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code
            for key in ("first", "second", "third", "fourth")
        }
        headers = {"Authorization": "Bearer first", "X-Request-Id": "my-id"}
        body = {"model": "one", "prompt": "hello\nthere", "max_tokens": 2, "min_tokens": 2}
        patient.post(f"{address}/v1/completions", json=body, headers=headers)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    assert statuses == {"first": 200, "second": 200, "third": 200, "fourth": 401}
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    assert all(line["time"].endswith("+00:00") for line in lines)
    assert [line["event"] for line in lines if "event" in line] == ["adapter loaded", "ready", "draining"]
    last = lines[-2]
    assert (last["id"], last["model"], last["prompt"]) == ("my-id", "one", "hello\nthere")
    assert last["completion_tokens"] == 2


def test_without_the_extra_its_command_is_named(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", str(base)]) == 2
    assert "pip install 'lorakit[serve]'" in capsys.readouterr().err


def test_a_reply_is_not_held_back_for_the_next_one() -> None:
    with listening() as opened, socket.create_connection(opened.getsockname()):
        accepted, _ = opened.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
