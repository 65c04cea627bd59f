"""Start the processes of an elastic run on this machine, and replace those that are lost. Imports no torch.

Invariant: the run ends when fewer workers are left than it may go on with. Until then no worker is ended because
another one failed: what all of them share, such as a loss that is not finite, ends each of them by itself.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final, TextIO, final

from lorakit.launch.environment import WORKER_VARIABLE
from lorakit.launch.exits import (
    COMMAND,
    RESUME_HINT,
    TEMPORARY_FAILURE,
    USER_ERROR,
    describe_exit,
    exit_code,
    explain_failure,
    explain_stop,
    failure_message,
    reason_only,
)
from lorakit.launch.launcher import (
    DEFAULT_DELAYS,
    Delays,
    StopSignals,
    recorded_signals,
    reserved_port,
    worker_environments,
)
from lorakit.launch.lighthouse import lighthouse_command
from lorakit.launch.workers import POLL_SECONDS, Worker, Workers, write_line

DECIDED: Final = (0, USER_ERROR, TEMPORARY_FAILURE)
"""exit codes that a worker chose: it has finished, or another one in its stead would end alike"""


def launch_elastically(
    command: Sequence[str],
    join_command: Sequence[str],
    *,
    processes: int,
    fewest: int,
    max_replaced: int,
    silent_seconds: float,
    stuck_seconds: float,
    delays: Delays = DEFAULT_DELAYS,
) -> int:
    """Run ``command`` in workers on this machine, and return the exit code. See `launch` for output and signals.

    join_command: of a worker that replaces a lost one, ``max_replaced`` times at most. fewest: workers with which the
    run goes on. silent_seconds, stuck_seconds: as `lighthouse_command`'s silent_seconds and wait_seconds.

    Raises:
        RunError: called outside the main thread, where Python delivers no signals.
    """
    sys.stderr.flush()
    with (
        recorded_signals() as signals,
        open(2, "w", errors="replace", closefd=False) as stderr,
        reserved_port() as port,
        _lighthouse(lighthouse_command(port, fewest, stuck_seconds, silent_seconds)) as lighthouse,
    ):
        environments = [environment | QUIET for environment in worker_environments(processes, port)]
        workers = Workers(command, environments, stderr)
        crew = _Crew(workers, join_command, environments, fewest, max_replaced, stderr)
        try:
            code, message = crew.run(signals, lighthouse, delays)
        finally:
            workers.kill()
            workers.output.flush(now=True)
        if message:
            write_line(message, stderr)
        return code


QUIET: Final = {"RUST_LOG": "error"}
"""torchft's server and client write a line for every step otherwise"""


@contextmanager
def _lighthouse(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run the lighthouse's process. In a session of its own, so that Ctrl-C does not end it before the workers."""
    process = subprocess.Popen(
        command, env={**os.environ, **QUIET}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()


@final
class _Crew:
    """The workers of an elastic run: those there, those lost, and how many are to replace them."""

    def __init__(
        self, workers: Workers, join_command: Sequence[str], environments: Sequence[Mapping[str, str]], fewest: int,
        max_replaced: int, stderr: TextIO,
    ) -> None:  # fmt: skip
        self._workers, self._join_command, self._environments = workers, join_command, environments
        self._fewest, self._max_replaced, self._stderr = fewest, max_replaced, stderr
        self._lost: list[Worker] = []
        self._num_replaced = 0

    def run(self, signals: StopSignals, lighthouse: subprocess.Popen[bytes], delays: Delays) -> tuple[int, str]:
        """Return exit code and message, once the run has ended."""
        workers = self._workers
        while workers.running:
            workers.wait(POLL_SECONDS, until=lambda: bool(self._new_ends()))
            if signals.name:
                workers.stop(delays.save_seconds, signals.is_repeated)
                break
            if lighthouse.poll() is not None:
                workers.stop(delays.save_seconds, signals.is_repeated)
                return TEMPORARY_FAILURE, f"{COMMAND} the lighthouse of parallel.elastic has ended{RESUME_HINT}"
            if self._new_ends():
                self._settle(delays)
                if not workers.running or any(worker.code == 0 for worker in workers.ended):
                    break
                if (why := self._replace()) is not None:
                    before = len(workers.ended)
                    workers.stop(delays.save_seconds, signals.is_repeated)
                    said = {"", *(worker.message for worker in self._lost)}
                    saved = [worker for worker in workers.ended[before:] if worker.message not in said]
                    messages = [why, *([failure_message(saved[0], saved)] if saved else [])]
                    return exit_code(self._lost[-1]), "\n".join(messages)
        if any(worker.code == 0 for worker in workers.ended):
            # the oldest worker writes the results, and one that was about to join would wait for ever
            oldest = next(worker for worker in workers.all if worker not in self._lost)
            while oldest.code is None and not signals.name:
                workers.wait(POLL_SECONDS)
            workers.wait(delays.settle_seconds)
            workers.stop(delays.grace_seconds, signals.is_repeated)
            return 0, ""
        failed = self._new_ends() or workers.failed
        failure = explain_stop(signals.name, failed) if signals.name else explain_failure(failed)
        return failure.exit_code, failure.message

    def _new_ends(self) -> list[Worker]:
        return [worker for worker in self._workers.ended if worker not in self._lost]

    def _settle(self, delays: Delays) -> None:
        """Wait for the others to end too, because what ends one may end all."""
        self._workers.wait(delays.settle_seconds)
        if all(worker.code in DECIDED for worker in self._new_ends()):
            self._workers.wait(delays.cause_seconds, until=lambda: any(w.code == 0 for w in self._workers.ended))

    def _replace(self) -> str | None:
        """Start a worker for each that is lost. Returns why the run cannot go on, or None."""
        workers, size = self._workers, len(self._environments)
        for worker in self._new_ends():
            self._lost.append(worker)
            reason = reason_only(failure_message(worker, [worker]) if worker.message else describe_exit(worker))
            then = ""
            if worker.code not in DECIDED and self._num_replaced < self._max_replaced:
                self._num_replaced += 1
                environment = {**self._environments[worker.rank], WORKER_VARIABLE: str(len(workers.all))}
                workers.start(self._join_command, environment)
                then = f", and another one starts ({self._num_replaced} of {self._max_replaced})"
            there = len(workers.running) - bool(then)
            if len(workers.running) < self._fewest:
                left = f"{there} of {size} processes left, fewer than parallel.elastic.min: {self._fewest}"
                return f"{COMMAND} {reason}; {left}"
            write_line(f"{COMMAND} {reason}; {there} of {size} go on{then}", self._stderr)
        return None
