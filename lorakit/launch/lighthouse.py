"""The meeting place of an elastic run: torchft's lighthouse in a process of its own, and the workers' side of it.

Invariant: one lighthouse decides, so two groups of one run never train at once. It hands out small facts as JSON and
listens on one address; of torchft nothing else runs (decision 0051). No file but this one imports torchft.
"""

import importlib.util
import os
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, final

from lorakit.errors import RunError
from lorakit.launch.workers import die_with

MODULE: Final = "lorakit.launch.lighthouse"
CONNECT_SECONDS: Final = 60.0
"""for the lighthouse to start: it imports torch as the workers do"""
BEATS: Final = 10
"""heartbeats in the time after which a silent worker is lost"""


def check_torchft() -> None:
    """Return if torchft is installed. Does not import it.

    Raises:
        RunError: it is not.
    """
    if importlib.util.find_spec("torchft") is None:
        raise RunError(
            "parallel.elastic needs torchft (Linux on x86-64, Python 3.11 to 3.13): pip install 'lorakit[elastic]', or"
            " leave the key out and let parallel.max_restarts start all processes from the last checkpoint"
        )


@dataclass(frozen=True)
class Quorum:
    """The workers that form a group now.

    number: grows with every change of members. members: facts of each, in the order in which their processes started.
    """

    number: int
    members: tuple[Mapping[str, Any], ...]


@final
class Lighthouse:
    """One worker's connection. Heartbeats begin with the first request, so nobody waits for a worker that loads."""

    def __init__(self, address: str, worker: int, silent_seconds: float) -> None:
        from torchft.coordination import LighthouseClient

        self._name, self._interval_seconds = f"{worker:09d}", silent_seconds / BEATS
        # a client for each thread: a request blocks until the others have come
        self._client, self._beats = (LighthouseClient(address, timedelta(seconds=CONNECT_SECONDS)) for _ in range(2))
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True)

    def request(self, facts: Mapping[str, Any], seconds: float) -> "Future[Quorum]":
        """Offer this worker for the next group. The result is there once enough workers have come.

        Its RuntimeError means: not in so many seconds, or the lighthouse does not answer.
        """
        if not self._heart.is_alive():
            self._heart.start()
        answer: Future[Quorum] = Future()
        # a daemon, because nothing can end a request, and Python waits for the threads of an executor before it exits
        threading.Thread(target=self._request, args=(dict(facts), seconds, answer), daemon=True).start()
        return answer

    def close(self) -> None:
        """End the heartbeats. A request under way is left alone."""
        self._ended.set()
        if self._heart.is_alive():  # a thread that returned from torchft while Python exits would abort the process
            self._heart.join(self._interval_seconds * BEATS)

    def _request(self, facts: dict[str, Any], seconds: float, answer: "Future[Quorum]") -> None:
        try:
            quorum = self._client.quorum(self._name, timedelta(seconds=seconds), data=facts)
            answer.set_result(Quorum(quorum.quorum_id, tuple(member.data for member in quorum.participants)))
        except Exception as problem:
            answer.set_exception(problem)

    def _beat(self) -> None:
        while not self._ended.wait(self._interval_seconds):
            try:
                self._beats.heartbeat(self._name, timedelta(seconds=self._interval_seconds * BEATS))
            except RuntimeError:  # the next request says so
                continue


def lighthouse_command(port: int, fewest: int, wait_seconds: float, silent_seconds: float) -> list[str]:
    """Return the command of a lighthouse's process.

    fewest: workers of a group. wait_seconds: for workers that are heard of and have not come. silent_seconds: after so
    long without a heartbeat a worker is lost.
    """
    values = (os.getpid(), port, fewest, round(1000 * wait_seconds), round(1000 * silent_seconds))
    return [sys.executable, "-m", MODULE, *map(str, values)]


def serve_workers() -> None:
    """Serve until the parent ends. The arguments are those of `lighthouse_command`."""
    parent, port, fewest, wait_ms, silent_ms = map(int, sys.argv[1:])
    die_with(parent)
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=f"127.0.0.1:{port}", min_replicas=fewest, join_timeout_ms=wait_ms, heartbeat_timeout_ms=silent_ms
    )
    while server.address():
        time.sleep(3600)


if __name__ == "__main__":
    serve_workers()
