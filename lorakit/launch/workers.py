"""The worker processes of one machine: started together, heard line by line, ended together. Imports no torch.

Whatever happens to one of them or to the launcher, none is left running. What a worker says last comes through a pipe
of its own, so that it can be said once, at the end, and not among the lines of the others.
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

from lorakit.launch.environment import LAUNCHED_BY

HOLD_SECONDS: Final = 0.3  # lines wait so long for equal ones from other ranks
LOOK_SECONDS: Final = 0.05
LAST_WORDS_BYTES: Final = 60_000  # fits a pipe, so that saying them never waits for the launcher
PR_SET_PDEATHSIG: Final = 1


@dataclass
class Worker:
    """One process: where its output and its last words are read, and how it ended."""

    rank: int
    process: subprocess.Popen[bytes]
    words_pipe: int
    output_pipe: int | None
    """None for a worker that writes to the terminal itself."""
    code: int | None = None
    """Exit code, negative for a signal; None while it runs."""
    words: str = ""


@final
class Workers:
    """The workers of this machine, one for each environment; ``ended`` has them in the order they were seen to end."""

    def __init__(self, command: Sequence[str], environments: Sequence[Mapping[str, str]], to: TextIO) -> None:
        self.all: list[Worker] = []
        self.ended: list[Worker] = []
        self.lines = OutputMerger(to)
        try:
            for environment in environments:
                self.all.append(_start(command, environment, to))
        except BaseException:
            self.kill()
            raise

    def poll(self) -> None:
        """Read what there is to read, see who has ended, and pass on lines."""
        for worker in self.living:
            worker.code = worker.process.poll()
            self._hear(worker)
            if worker.code is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.process.pid, signal.SIGKILL)  # what it may have started itself
                worker.words = _read(worker.words_pipe).decode(errors="replace").strip()
                for pipe in (worker.words_pipe, worker.output_pipe):
                    if pipe is not None:
                        os.close(pipe)
                self.ended.append(worker)
        self.lines.flush()

    @property
    def living(self) -> list[Worker]:
        return [worker for worker in self.all if worker.code is None]

    @property
    def failed(self) -> list[Worker]:
        return [worker for worker in self.ended if worker.code != 0]

    def kill(self) -> None:
        """SIGKILL to the living and whatever they started, and wait for it."""
        for worker in self.living:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)
        for worker in self.living:
            worker.process.wait()
        self.poll()

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Look on for a moment, or until something is so, without ending anybody."""
        end = time.monotonic() + seconds
        while self.living and time.monotonic() < end and not until():
            time.sleep(LOOK_SECONDS)
            self.poll()

    def end(self, seconds: float, hurried: Callable[[], bool]) -> None:
        """SIGTERM to the living; who still lives after ``seconds``, or once ``hurried()`` says so, is killed."""
        for worker in self.living:
            worker.process.terminate()
        until = time.monotonic() + seconds
        while self.living and time.monotonic() < until and not hurried():
            time.sleep(LOOK_SECONDS)
            self.poll()
        self.kill()

    def _hear(self, worker: Worker) -> None:
        if worker.output_pipe is not None:
            self.lines.read(worker.rank, _read(worker.output_pipe), over=worker.code is not None)


@final
@dataclass
class OutputMerger:
    """Output of many ranks as one, line by line; what several say alike within a moment is said once."""

    _to: TextIO
    _unfinished: dict[int, bytes] = field(default_factory=dict)
    _held: dict[int, list[str]] = field(default_factory=dict)
    _since: float = 0.0

    def read(self, rank: int, data: bytes, *, over: bool = False) -> None:
        """Take more output of a rank; ``over``: there will be no more, so an unfinished line is a line."""
        *lines, rest = (self._unfinished.pop(rank, b"") + data).split(b"\n")
        if rest and (over or len(rest) > 2**16):
            lines, rest = [*lines, rest], b""
        self._unfinished[rank] = rest
        if lines:
            self._since = self._since if self._held else time.monotonic()
            shown = (line.decode(errors="replace").rstrip("\r").rpartition("\r")[2] for line in lines)
            self._held.setdefault(rank, []).extend(shown)

    def flush(self, *first: int, now: bool = False) -> None:
        """Print what has waited long enough, or ``now`` everything; ranks in ``first`` speak first."""
        if not self._held or not (now or first or time.monotonic() - self._since >= HOLD_SECONDS):
            return
        groups: dict[tuple[str, ...], list[int]] = {}
        for rank in sorted(self._held, key=lambda rank: (rank not in first, rank)):
            groups.setdefault(tuple(self._held[rank]), []).append(rank)
        self._held.clear()
        for lines, ranks in groups.items():
            for line in lines:
                say(f"[{named(ranks)}] {line}", self._to)


def say(text: str, to: TextIO) -> None:
    """A line above the progress bar that rank 0 may be drawing there."""
    with contextlib.suppress(OSError, ValueError):  # a terminal that was closed must not keep the workers alive
        to.write(("\r\x1b[2K" if to.isatty() else "") + text + "\n")
        to.flush()


def named(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 1-3`` or ``ranks 1, 4``."""
    first, last = min(ranks), max(ranks)
    if first == last:
        return f"rank {first}"
    return f"ranks {first}-{last}" if last - first == len(ranks) - 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"


def die_with_parent(environment: Mapping[str, str] = os.environ) -> None:
    """In a worker of lorakit's launcher: arrange to be killed when the launcher is gone, also by SIGKILL.

    Does nothing in any other process. If the launcher has gone already, this process ends here.
    """
    if LAUNCHED_BY not in environment:
        return
    parent = int(environment[LAUNCHED_BY].split()[0])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(75)


def final_message(text: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Leave it to lorakit's launcher to say why this worker ends; False in any other process: say it yourself."""
    told = environment.get(LAUNCHED_BY, "").split()
    if len(told) != 2:
        return False
    try:
        if not stat.S_ISFIFO(os.fstat(int(told[1])).st_mode):
            return False
        os.write(int(told[1]), text.encode()[:LAST_WORDS_BYTES])
    except OSError:
        return False
    return True


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(75)


def _start(command: Sequence[str], environment: Mapping[str, str], to: TextIO) -> Worker:
    """One worker, in a session of its own: Ctrl-C reaches it through the launcher only. Rank 0 inherits the output."""
    rank = int(environment["RANK"])
    words, words_end = os.pipe()
    output, output_end = (None, None) if rank == 0 else os.pipe()
    try:
        process = subprocess.Popen(
            command, env={**environment, LAUNCHED_BY: f"{os.getpid()} {words_end}"}, stdin=subprocess.DEVNULL,
            stdout=output_end, stderr=to if output_end is None else output_end, pass_fds=[words_end],
            start_new_session=True,
        )  # fmt: skip
    finally:
        for pipe in (words_end, output_end):
            if pipe is not None:
                os.close(pipe)
    for pipe in (words, output):
        if pipe is not None:
            os.set_blocking(pipe, False)
    return Worker(rank, process, words, output)


def _read(pipe: int) -> bytes:
    """What is in a pipe now, a megabyte at most: a worker that never stops talking must not stop the launcher."""
    data = b""
    with contextlib.suppress(BlockingIOError):
        while len(data) < 2**20 and (more := os.read(pipe, 2**16)):
            data += more
    return data
