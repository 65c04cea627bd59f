"""Start the processes of one machine, end them together, and start all of them once more after a failure.

Invariant: no worker outlives the launcher, and the exit code and the message are those of the root cause: an exit that
may only follow from another worker's failure is the cause only if there is no other exit. Several machines are started
by torchrun, srun, mpirun or Kubernetes (launch/environment.py). Imports no torch.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Final, TextIO

from lorakit.errors import LorakitError, RunError, TemporaryFailure
from lorakit.launch.environment import World
from lorakit.launch.interrupts import handling
from lorakit.launch.workers import POLL_SECONDS, Worker, Workers, format_ranks, usable_cores, write_line

LOOPBACK: Final = "127.0.0.1"
USER_ERROR: Final = LorakitError.exit_code
TEMPORARY_FAILURE: Final = TemporaryFailure.exit_code
COMMAND: Final = "lorakit train:"
RESUME_HINT: Final = "; what was saved is kept, the same command goes on"
OUTPUT_HINT: Final = "; what it said is above"
# SIGABRT: a library aborted on a lost connection. SIGTERM: from outside. 75: its watchdog named another rank's failure.
CONSEQUENCE_CODES: Final = {-signal.SIGABRT, -signal.SIGTERM, TEMPORARY_FAILURE}
FAILURES_SECONDS: Final = 0.5  # for other workers to fail: the first to exit may have followed another one's failure
CAUSE_SECONDS: Final = 9.0
"""for the cause, while every exit is a consequence. Longer than rank 0 stays for the others to read its reason
(launch/watchdog.py), because that rank exits after them"""
KILL_SECONDS: Final = 5.0  # from SIGTERM to SIGKILL, after a failure
KILL_SAVING_SECONDS: Final = 20.0  # after a worker exited with 75: a scheduler may have stopped all, and they save
KILL_STOPPED_SECONDS: Final = 60.0  # after a signal to the launcher: the step under way and its checkpoint
MakeCommand = Callable[[], Sequence[str]]  # returns the words of the command of a restart


@dataclass(frozen=True)
class GroupFailure:
    """Why all workers ended: the launcher's exit code, the message, and whether a restart could end otherwise."""

    exit_code: int
    message: str
    may_restart: bool


def launch(
    command: Sequence[str], *, processes: int, max_restarts: int = 0, restart_command: MakeCommand | None = None
) -> int:
    """Run ``command`` in ``processes`` workers on this machine and return the exit code.

    Rank 0 inherits standard output and standard error. The output of the other ranks is passed on to standard error,
    each line after ``[rank 3] ``. SIGINT, SIGTERM and SIGHUP are sent to each worker once, as SIGTERM, so that it
    saves; a second SIGINT kills the workers. After a failure that is no user error all workers start again, up to
    ``max_restarts`` times, with the command that ``restart_command`` returns (None: ``command``). OMP_NUM_THREADS is
    cores / workers, unless the environment sets it.

    Raises RunError: called outside the main thread, where Python delivers no signals.
    """
    sys.stderr.flush()
    # a file of its own: sys.stderr may be replaced, and the workers inherit descriptor 2
    with recorded_signals() as signals, open(2, "w", errors="replace", closefd=False) as stderr:
        restarts = 0
        while True:
            failure = _run_workers(command, processes, signals, stderr)
            if failure is None:
                return 0
            if not failure.may_restart or restarts == max_restarts:
                write_line(failure.message, stderr)
                return failure.exit_code
            restarts += 1
            command = restart_command() if restart_command else command
            reason = failure.message.removesuffix(OUTPUT_HINT).removesuffix(RESUME_HINT).removeprefix(COMMAND).strip()
            restart = f"all start again from the last checkpoint ({restarts} of {max_restarts})"
            write_line(f"{COMMAND} {reason}; {restart}", stderr)


@contextlib.contextmanager
def recorded_signals() -> Iterator[list[str]]:
    """Yield a list that gets the names of signals as they arrive. Raises RunError outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        raise RunError("several processes are started from the main thread only")
    received: list[str] = []

    def record(number: int, frame: FrameType | None) -> None:
        # schedulers repeat SIGTERM, so SIGTERM after a first signal is the same request; Ctrl-C twice means "now"
        if not received or number == signal.SIGINT:
            received.append(signal.Signals(number).name)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # a run under nohup ignores SIGHUP, and so must the launcher
    with handling([number for number in numbers if signal.getsignal(number) != signal.SIG_IGN], record):
        yield received


def _run_workers(command: Sequence[str], processes: int, signals: list[str], stderr: TextIO) -> GroupFailure | None:
    """Start all workers once and wait for all to end; None if all succeeded."""
    # a port for rank 0's store, bound until the workers have ended, so that the system gives it to no other program;
    # rank 0 can still listen there, because torch's store and this socket both set SO_REUSEADDR
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind((LOOPBACK, 0))
        workers = Workers(command, worker_environments(processes, reservation.getsockname()[1]), stderr)
        try:
            while workers.running and not workers.failed:
                if signals:
                    workers.stop(KILL_STOPPED_SECONDS, is_urgent=lambda: len(signals) > 1)
                else:
                    workers.wait(POLL_SECONDS)
            if not workers.failed:
                return None
            return _end_after_failure(workers, signals)
        finally:
            workers.kill()
            workers.flush()


def _end_after_failure(workers: Workers, signals: list[str]) -> GroupFailure:
    """End the other workers, and return why the group failed."""
    if not signals:
        workers.wait(FAILURES_SECONDS)
        workers.wait(CAUSE_SECONDS, until=lambda: not all(map(is_consequence, workers.failed)))
    failed = list(workers.failed)  # the exits after this line follow from the SIGTERM below
    first = root_cause(failed)
    workers.flush(first.rank)
    seconds = KILL_SAVING_SECONDS if first.code == TEMPORARY_FAILURE else KILL_SECONDS
    workers.stop(seconds, is_urgent=lambda: len(signals) > 1)
    if signals:  # the messages of workers that saved, and other failures
        saved = [worker for worker in workers.failed if worker.code == TEMPORARY_FAILURE and worker.message]
        message = failure_message(saved[0], saved) if saved else f"{COMMAND} stopped by {signals[-1]}{RESUME_HINT}"
        first = root_cause(workers.failed)
        if severity(first) in (0, 2):
            message = f"{failure_message(first, workers.failed)}\n{message}"
        return GroupFailure(TEMPORARY_FAILURE, message, may_restart=False)
    code = first.code or 0
    may_restart = code not in (USER_ERROR, TEMPORARY_FAILURE)
    # a death by signal is temporary
    return GroupFailure(TEMPORARY_FAILURE if code < 0 else code, failure_message(first, failed), may_restart)


def worker_environments(processes: int, port: int) -> list[dict[str, str]]:
    """Return each rank's variables, as torchrun's; without TORCHELASTIC_*, by which rank 0 would serve no store."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    common = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "OMP_NUM_THREADS": str(max(1, usable_cores() // processes)),
        **inherited,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
    }
    worlds = [World(rank, processes, rank, processes, "lorakit", LOOPBACK, port) for rank in range(processes)]
    return [common | world.variables() for world in worlds]


# --- the root cause of a failure -------------------------------------------------------------------------------------


def root_cause(failed: Sequence[Worker]) -> Worker:
    """Return the worker whose exit is the most severe; ties go to one with a message, then to the first to exit."""
    return min(failed, key=lambda worker: (severity(worker), not worker.message))


def severity(worker: Worker) -> int:
    """0 for a user error, 1 for a death by signal, 2 for another failure, 3 for a possible consequence of one."""
    code = worker.code or 0
    if code == USER_ERROR:
        return 0
    if code in CONSEQUENCE_CODES:
        return 3
    return 1 if code < 0 else 2


def is_consequence(worker: Worker) -> bool:
    """True if another worker may be the cause: also exit code 2 without a message, which that one's rank sends."""
    return not worker.message and (severity(worker) == 3 or worker.code == USER_ERROR)


def failure_message(first: Worker, failed: Sequence[Worker]) -> str:
    """Return the message of ``first``, then different user errors of other ranks; without one, how it exited."""
    if not first.message:
        code = first.code or 0
        how = f"stopped{RESUME_HINT}" if code == TEMPORARY_FAILURE else f"failed (exit code {code}){OUTPUT_HINT}"
        if code < 0:
            # the kernel's out-of-memory killer sends SIGKILL and leaves no message
            hint = " (out of memory?)" if code == -signal.SIGKILL else ""
            how = f"was killed by {signal.Signals(-code).name}{hint}{RESUME_HINT}"
        return f"{COMMAND} rank {first.rank} {how}"
    ranks_by_message: dict[str, list[int]] = {first.message: []}
    for worker in failed:
        is_user_error = bool(worker.message) and worker.code == first.code == USER_ERROR
        if worker.message == first.message or is_user_error:
            ranks_by_message.setdefault(worker.message, []).append(worker.rank)
    return "\n".join(
        message if 0 in ranks else f"[{format_ranks(ranks)}] {message}" for message, ranks in ranks_by_message.items()
    )
