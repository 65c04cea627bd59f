"""`lorakit serve` starts, answers, and ends at a signal."""

import signal
import socket
import sys
import time
from pathlib import Path

import httpx
import pytest

from lorakit.cli import main
from tests.helpers.fork_server import start_python
from tests.helpers.patches import make_patch


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_command_serves_until_a_signal_ends_it(base: Path, tmp_path: Path) -> None:
    port, patch = free_port(), make_patch(base, tmp_path / "patch")
    arguments = ["serve", base, "--adapter", f"a={patch}", "--name", "tiny", "--port", port, "--dtype", "fp32"]
    with start_python("-m", "lorakit.cli", *arguments) as process:
        address = f"http://127.0.0.1:{port}"
        for _ in range(600):
            assert process.poll() is None
            try:
                if httpx.get(f"{address}/health").status_code == 200:
                    break
            except httpx.ConnectError:
                time.sleep(0.1)
        body = {"model": "a", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "min_tokens": 3}
        reply = httpx.post(f"{address}/v1/chat/completions", json=body).json()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) in (0, -signal.SIGTERM)
    assert reply["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--adapter", "tiny=x", "--name", "tiny"], "--adapter tiny: is the base's name too"),
        (["--adapter", "a=nowhere"], "nowhere: no such folder"),
    ],
)
def test_what_cannot_be_served_is_said(
    base: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(base), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_without_the_extra_its_command_is_named(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", str(base)]) == 2
    assert "pip install 'lorakit[serve]'" in capsys.readouterr().err
