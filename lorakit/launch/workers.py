"""Worker processes of one machine: start them, merge their output, end them. Imports no torch.

Invariant: whatever happens to a worker or to the launcher, no worker keeps running. A worker sends the message that
explains its failure through a pipe of its own, so that the launcher prints one message, last.
"""

import contextlib
import ctypes
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TextIO, final

from lorakit.errors import TemporaryFailure
from lorakit.launch.environment import LAUNCHER_VARIABLE

MERGE_SECONDS: Final = 0.3  # How long a line waits for equal lines of other ranks.
POLL_SECONDS: Final = 0.05
MAX_MESSAGE_BYTES: Final = 60_000  # less than a pipe's 64 KiB, because a worker must not wait for the launcher to read
PR_SET_PDEATHSIG: Final = 1  # from <linux/prctl.h>


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # not on macOS


@dataclass
class Worker:
    """One process, its pipes, and how it ended."""

    rank: int
    process: subprocess.Popen[bytes]
    message_pipe: int
    code: int | None = None  # Exit code, negative for a signal; None while it runs.
    message: str = ""  # Its explanation of a failure; empty if it sent none.
    unfinished: bytes = b""  # The begun line of its output.
    lines: list[str] = field(default_factory=list)  # Those that wait for equal lines of other ranks.


@final
class Workers:
    """The workers of this machine, one for each environment. ``ended`` lists them in the order of their exits."""

    def __init__(self, command: Sequence[str], environments: Sequence[Mapping[str, str]], stderr: TextIO) -> None:
        self.all: list[Worker] = []
        self.ended: list[Worker] = []
        self._stderr = stderr
        self._waiting_since: float | None = None  # of the oldest line that waits
        try:
            for environment in environments:
                self.all.append(_start(command, environment, stderr))
        except BaseException:
            self.kill()
            raise

    @property
    def running(self) -> list[Worker]:
        return [worker for worker in self.all if worker.code is None]

    @property
    def failed(self) -> list[Worker]:
        return [worker for worker in self.ended if worker.code != 0]

    def poll(self) -> None:
        """Read all pipes, record the workers that ended, and print the lines that are due."""
        for worker in self.running:
            # before reading: a worker that has exited writes no more, so the read below gets all of its output
            worker.code = worker.process.poll()
            output = worker.process.stdout  # None for rank 0, which inherits the launcher's
            if output is not None:
                self._add_output(worker, _read(output.fileno()))
            if worker.code is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.process.pid, signal.SIGKILL)  # processes that the worker started
                worker.message = _read(worker.message_pipe).decode(errors="replace").strip()
                os.close(worker.message_pipe)
                if output is not None:
                    output.close()
                self.ended.append(worker)
        if self._waiting_since is not None and time.monotonic() - self._waiting_since >= MERGE_SECONDS:
            self.flush()

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Poll for ``seconds``, or until a condition is true or all workers have ended."""
        end = time.monotonic() + seconds
        while self.running and time.monotonic() < end and not until():
            time.sleep(POLL_SECONDS)
            self.poll()

    def stop(self, seconds: float, is_urgent: Callable[[], bool]) -> None:
        """Send SIGTERM to all; after ``seconds``, or as soon as ``is_urgent()``, kill the workers that still run."""
        for worker in self.running:
            worker.process.terminate()
        self.wait(seconds, until=is_urgent)
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL to the running workers and the processes they started, and wait for the workers' exits."""
        for worker in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)
        for worker in self.running:
            worker.process.wait()
        self.poll()

    def flush(self, first: int = 0) -> None:
        """Print the lines that wait, those of rank ``first`` first; equal lines of several ranks become one."""
        ranks_by_lines: dict[tuple[str, ...], list[int]] = {}
        for worker in sorted(self.all, key=lambda worker: worker.rank != first):
            if worker.lines:
                ranks_by_lines.setdefault(tuple(worker.lines), []).append(worker.rank)
                worker.lines.clear()
        self._waiting_since = None
        for lines, ranks in ranks_by_lines.items():
            for line in lines:
                write_line(f"[{format_ranks(ranks)}] {line}", self._stderr)

    def _add_output(self, worker: Worker, data: bytes) -> None:
        *lines, rest = (worker.unfinished + data).split(b"\n")
        if rest and (worker.code is not None or len(rest) > 2**16):
            lines.append(rest)
            rest = b""
        worker.unfinished = rest
        if lines and self._waiting_since is None:
            self._waiting_since = time.monotonic()
        # a progress bar rewrites its line after \r: only the last state is printed
        worker.lines += (line.decode(errors="replace").rstrip("\r").rpartition("\r")[2] for line in lines)


def write_line(text: str, stderr: TextIO) -> None:
    """Write a line; in a terminal, above the progress bar that rank 0 may be drawing there."""
    with contextlib.suppress(OSError, ValueError):  # the terminal may be closed, and the workers must still be ended
        stderr.write(("\r\x1b[2K" if stderr.isatty() else "") + text + "\n")
        stderr.flush()


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 1``, ``ranks 1-3`` or ``ranks 1, 4``."""
    first = min(ranks)
    last = max(ranks)
    if first == last:
        return f"rank {first}"
    return f"ranks {first}-{last}" if last - first == len(ranks) - 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"


def die_with_parent() -> None:
    """Have this worker killed when lorakit's launcher ends, even by SIGKILL; exit with 75 if it has ended already."""
    if LAUNCHER_VARIABLE in os.environ:
        die_with(int(os.environ[LAUNCHER_VARIABLE].split()[0]))


def die_with(parent: int) -> None:
    """Arrange for this process to be killed when its parent ends. Exits with 75 if the parent has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()
    # after the request above, because a launcher that ended before it sends no signal
    if os.getppid() != parent:
        os._exit(TemporaryFailure.exit_code)


def send_failure_message(text: str) -> bool:
    """Send lorakit's launcher the message that explains this worker's failure; False in any other process."""
    fields = os.environ.get(LAUNCHER_VARIABLE, "").split()
    if len(fields) != 2:
        return False
    pipe = int(fields[1])
    try:
        # a process that a worker started inherits the variable, and the descriptor may be another file there
        if not stat.S_ISFIFO(os.fstat(pipe).st_mode):
            return False
        os.write(pipe, text.encode()[:MAX_MESSAGE_BYTES])
    except OSError:
        return False
    return True


def _exit_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(TemporaryFailure.exit_code)


def _start(command: Sequence[str], environment: Mapping[str, str], stderr: TextIO) -> Worker:
    """Start one worker in its own session, so that Ctrl-C reaches it once, through the launcher."""
    rank = int(environment["RANK"])
    message_pipe, message_end = os.pipe()
    try:
        process = subprocess.Popen(
            command,
            env={**environment, LAUNCHER_VARIABLE: f"{os.getpid()} {message_end}"},
            stdin=subprocess.DEVNULL,
            # rank 0 writes to the terminal itself, because a progress bar behaves otherwise in a pipe
            stdout=None if rank == 0 else subprocess.PIPE,
            stderr=stderr if rank == 0 else subprocess.STDOUT,
            pass_fds=[message_end],
            start_new_session=True,
        )
    finally:
        os.close(message_end)
    os.set_blocking(message_pipe, False)
    if process.stdout is not None:
        os.set_blocking(process.stdout.fileno(), False)
    return Worker(rank, process, message_pipe)


def _read(pipe: int) -> bytes:
    """Return the bytes in a pipe, 1 MiB at most: a worker that never stops writing must not block the launcher."""
    data = b""
    with contextlib.suppress(BlockingIOError):
        while len(data) < 2**20 and (more := os.read(pipe, 2**16)):
            data += more
    return data
