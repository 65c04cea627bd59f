"""Handle signals: a run finishes its step and saves; an import, or a call that runs no Python, ends at once.

An exception of a handler is no way out of these two: libraries catch everything around their imports, so it is lost, or
comes back as "could not import module"; and while a library waits in C, no handler is called.
"""

import itertools
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Final

from lorakit.errors import TemporaryFailure
from lorakit.launch.workers import send_failure_message

IMPORT_FILE: Final = "<frozen importlib._bootstrap>"  # that of every import's own frames
FIRST_LINE_SECONDS: Final = 10.0  # of waiting until it is told what is waited for, and then each minute
GRACE_SECONDS: Final = 2.0  # for a handler of Python, from a signal on
INTERRUPTED: Final = "interrupted; the same command begins again or goes on"


def exit_if_importing(frame: FrameType | None, text: str) -> None:
    """Print why, and end this process with exit code 75, if a frame or a caller imports a module. Nothing is lost."""
    while frame is not None and frame.f_code.co_filename != IMPORT_FILE:
        frame = frame.f_back
    if frame is None:
        return
    if not send_failure_message(text):
        # not `print`, because the signal may have interrupted one
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{text}\n".encode())
    os._exit(TemporaryFailure.exit_code)


@contextmanager
def handling(numbers: Sequence[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have a function handle signals inside the block, if this is the main thread, which alone gets them."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers if is_main}
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Watch a call in the block that waits in C: print what it waits for, and end this process on a signal."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    threading.Thread(target=_watch, args=(reader, text), daemon=True).start()
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.set_wakeup_fd(writer) if is_main else None
    try:
        yield
    finally:
        if before is not None:
            signal.set_wakeup_fd(before)
        os.close(writer)


def _watch(reader: int, text: str) -> None:
    """Read the numbers of signals, which Python writes at once, until the block ends."""
    number = 0
    for seconds in itertools.chain([FIRST_LINE_SECONDS], itertools.repeat(60.0)):
        while select.select([reader], [], [], GRACE_SECONDS if number else seconds)[0]:
            received = os.read(reader, 1)
            if not received:
                os.close(reader)
                return
            number = received[0]
        if number:
            os.write(2, f"lorakit: stopped by {signal.Signals(number).name} while {text}\n".encode())
            os._exit(TemporaryFailure.exit_code)
        os.write(2, f"lorakit: {text}\n".encode())


@contextmanager
def interrupts_end_imports(text: str) -> Iterator[None]:
    """Let Ctrl-C end imports inside the block with a line of text; elsewhere it raises KeyboardInterrupt as before."""

    def receive(number: int, frame: FrameType | None) -> None:
        exit_if_importing(frame, text)
        raise KeyboardInterrupt

    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # nohup ignores it
    with handling([signal.SIGINT] if is_default else [], receive):
        yield


@dataclass
class StopRequest:
    """A signal's request to stop; a second SIGINT stops at once. Schedulers repeat SIGTERM, so it counts once."""

    deferred: bool = False  # the loop polls for it; otherwise the run stops where it is
    answer: Callable[[], str] | None = None  # returns the line to print at a first signal, as a step may take minutes
    signal_name: str | None = None

    def is_requested(self) -> bool:
        return self.signal_name is not None

    def defer(self) -> None:
        """Let signals interrupt nothing from here on; the loop polls instead."""
        self.deferred = True

    def receive(self, number: int, frame: FrameType | None) -> None:
        was_requested = self.is_requested()
        self.signal_name = signal.Signals(number).name
        stopped = f"stopped at once by {self.signal_name}"
        goes_on = "the same command goes on after the last checkpoint"
        if not self.deferred:
            text = f"{stopped}, before training began; {goes_on} if there is one"
            exit_if_importing(frame, f"lorakit train: {text}")
            raise TemporaryFailure(text)
        if was_requested and number == signal.SIGINT:
            raise TemporaryFailure(f"{stopped}; {goes_on}, or begins with the first step if there is none")
        if not was_requested and self.answer is not None:
            # not print, which a signal may interrupt while it holds its buffer's lock
            os.write(2, f"\n{self.signal_name}: {self.answer()}\n".encode())


@contextmanager
def catching_signals() -> Iterator[StopRequest]:
    """Turn SIGINT and SIGTERM into a StopRequest inside the block."""
    request = StopRequest()
    with handling((signal.SIGINT, signal.SIGTERM), request.receive):
        yield request
