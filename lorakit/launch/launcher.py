"""Start the processes of one machine, end them together, and start all of them once more after a failure.

Invariant: no worker outlives the launcher, and the exit code is that of the worker which failed first on its own.
Several machines are started by torchrun, srun, mpirun or Kubernetes (launch/environment.py). Imports no torch.
"""

import contextlib
import os
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Final, TextIO

from lorakit.errors import RunError
from lorakit.launch.environment import DEFAULT_PORT
from lorakit.launch.exits import (
    COMMAND,
    TEMPORARY_FAILURE,
    GroupFailure,
    explain_failure,
    explain_stop,
    is_consequence,
    reason_only,
    root_cause,
)
from lorakit.launch.workers import POLL_SECONDS, Workers, usable_cores, write_line

LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True)
class Delays:
    """Longest waits of the launcher, in seconds."""

    settle_seconds: float = 0.5
    """After a failure: for other workers to fail, because the first to exit may have followed another one's failure."""
    cause_seconds: float = 6.0
    """For the cause, while every exit is a consequence. Longer than a failed rank waits for the others to read its
    reason (5 s, launch/watchdog.py), because that rank exits after them."""
    grace_seconds: float = 5.0
    """From SIGTERM to SIGKILL, after a failure."""
    yield_seconds: float = 20.0
    """From SIGTERM to SIGKILL, after a worker exited with 75: a scheduler may have stopped all, and they save."""
    save_seconds: float = 60.0
    """From SIGTERM to SIGKILL, after a signal to the launcher: the step under way and its checkpoint."""


DEFAULT_DELAYS: Final = Delays()


def launch(command: Sequence[str], *, processes: int, max_restarts: int = 0, delays: Delays = DEFAULT_DELAYS) -> int:
    """Run ``command`` in ``processes`` workers on this machine and return the exit code.

    Rank 0 inherits standard output and standard error. The output of the other ranks is passed on to standard error,
    each line after ``[rank 3] ``. SIGINT, SIGTERM and SIGHUP are sent to each worker once, as SIGTERM, so that it
    saves; a second SIGINT kills the workers. After a failure that is no user error all workers start again, up to
    ``max_restarts`` times. OMP_NUM_THREADS is cores / workers, unless the environment sets it.

    Raises:
        RunError: called outside the main thread, where Python delivers no signals.
    """
    sys.stderr.flush()
    # a file of its own: sys.stderr may be replaced, and the workers inherit descriptor 2
    with recorded_signals() as signals, open(2, "w", errors="replace", closefd=False) as stderr:
        restarts = 0
        while True:
            failure = _run_workers(command, processes, signals, delays, stderr)
            if failure is None:
                return 0
            if not failure.may_restart or restarts == max_restarts:
                write_line(failure.message, stderr)
                return failure.exit_code
            restarts += 1
            write_line(
                f"{COMMAND} {reason_only(failure.message)}; all start again from the last checkpoint"
                f" ({restarts} of {max_restarts})",
                stderr,
            )


def require_one_machine(*, nodes: int, processes: int, rendezvous: str | None, arguments: Sequence[str]) -> None:
    """Refuse a recipe for several machines that no launcher started, naming the torchrun line for ``arguments``.

    Raises:
        RunError: ``nodes`` is more than 1.
    """
    if nodes == 1:
        return
    endpoint = rendezvous or f"HOST:{DEFAULT_PORT}"
    host = "" if rendezvous else ", where HOST is one of them"
    raise RunError(
        f"parallel.nodes is {nodes}, and `lorakit train` starts the processes of one machine only."
        f" Run this on every machine{host} (docs/clusters.md has Slurm, mpirun and Kubernetes):\n"
        f"  torchrun --nnodes {nodes} --nproc-per-node {processes // nodes} --rdzv-backend c10d"
        f" --rdzv-endpoint {endpoint} -m lorakit.cli {shlex.join(arguments)}"
    )


class StopSignals:
    """Stop requests that the launcher received: the last signal's name ("" for none) and their number."""

    def __init__(self) -> None:
        self.name, self.count = "", 0

    def record(self, number: int, frame: FrameType | None) -> None:
        # schedulers repeat SIGTERM, so SIGTERM after a first signal is the same request; Ctrl-C twice means "now"
        if not self.name or number == signal.SIGINT:
            self.name, self.count = signal.Signals(number).name, self.count + 1

    def is_repeated(self) -> bool:
        return self.count > 1


@contextlib.contextmanager
def recorded_signals() -> Iterator[StopSignals]:
    """Record SIGINT, SIGTERM and SIGHUP instead of acting on them, unless they are ignored.

    Raises:
        RunError: called outside the main thread, where Python delivers no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RunError("several processes are started from the main thread only")
    received = StopSignals()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # a run under nohup ignores SIGHUP, and so must the launcher
            signal.signal(number, received.record)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_workers(
    command: Sequence[str], processes: int, signals: StopSignals, delays: Delays, stderr: TextIO
) -> GroupFailure | None:
    """Start all workers once and wait for all to end; None if all succeeded."""
    with reserved_port() as port:
        workers = Workers(command, worker_environments(processes, port), stderr)
        try:
            while workers.running and not workers.failed:
                if signals.name:
                    workers.stop(delays.save_seconds, signals.is_repeated)
                else:
                    workers.wait(POLL_SECONDS)
            if not workers.failed:
                return None
            return _end_after_failure(workers, signals, delays)
        finally:
            workers.kill()
            workers.output.flush(now=True)


def _end_after_failure(workers: Workers, signals: StopSignals, delays: Delays) -> GroupFailure:
    """End the other workers, and return why the group failed."""
    if not signals.name:
        workers.wait(delays.settle_seconds)
        if all(map(is_consequence, workers.failed)):
            workers.wait(delays.cause_seconds, until=lambda: not all(map(is_consequence, workers.failed)))
    failed = list(workers.failed)  # the exits after this line follow from the SIGTERM below
    first = root_cause(failed)
    workers.output.flush(first.rank)
    workers.stop(delays.yield_seconds if first.code == TEMPORARY_FAILURE else delays.grace_seconds, signals.is_repeated)
    return explain_stop(signals.name, workers.failed) if signals.name else explain_failure(failed)


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port of 127.0.0.1 for rank 0's store, reserved until the workers have ended.

    The reservation is bound but does not listen. The system then gives the port to no program that takes any free port.
    Rank 0 can still listen there, because torch's store and this socket both set SO_REUSEADDR.
    """
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind((LOOPBACK, 0))
        yield reservation.getsockname()[1]


def worker_environments(processes: int, port: int) -> list[dict[str, str]]:
    """Return the environment variables of each rank, as torchrun sets them on one machine.

    torchrun's own TORCHELASTIC_* are left out: with TORCHELASTIC_USE_AGENT_STORE rank 0 would connect to a store of
    torchrun instead of serving one.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    common = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_CPP_LOG_LEVEL": "ERROR",
        "OMP_NUM_THREADS": str(_threads_per_worker(processes)),
        **inherited,
        "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port),
    }  # fmt: skip
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def _threads_per_worker(processes: int) -> int:
    return max(1, usable_cores() // processes)
