"""Run an application on a real port in a thread, or the command in a process."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from lorakit.serving.connections import TimedProtocol, bound_socket
from tests.helpers.fork_server import ForkedProcess, start_python


def listening() -> socket.socket:
    """Return a socket that listens as the server's does."""
    bound = bound_socket("127.0.0.1", 0)
    bound.listen()
    return bound


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Run an application in a thread; yield its address."""
    bound = listening()
    server = uvicorn.Server(uvicorn.Config(app, http=TimedProtocol, log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    server.should_exit = True
    thread.join()


@contextmanager
def started(base: Path, *arguments: object, log: Path, port: int = 0) -> Iterator[tuple[ForkedProcess, str]]:
    """Start `lorakit serve` with the base named `tiny`; yield its process and address.

    log: its standard error; its standard output is the file beside it with the suffix `.out`.
    """
    command = ["serve", base, "--name", "tiny", "--port", port, "--dtype", "fp32", *arguments]
    with (
        log.open("w") as err, log.with_suffix(".out").open("w") as out,
        start_python("-m", "lorakit.cli", *command, stdout=out.fileno(), stderr=err.fileno()) as process,
    ):  # fmt: skip
        while not (ready := [line for line in log.read_text().splitlines() if '"ready"' in line]):
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield process, json.loads(ready[0])["url"].removesuffix("/v1")
