"""Handle SIGINT and SIGTERM: finish the step, save, exit 75. A second SIGINT stops at once.

SIGTERM counts once however often it comes: schedulers send it again while a run is saving.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from lorakit.errors import TemporaryFailure
from lorakit.launch.interrupts import exit_if_importing, handling


class StopRequest:
    """A signal's request to stop. ``deferred``: the loop polls for it; otherwise the run stops where it is.

    ``answer``: the line that answers a first signal at once, because a step may take minutes; None prints nothing.
    """

    def __init__(self) -> None:
        self.deferred = False
        self.answer: Callable[[], str] | None = None
        self.signal_name: str | None = None

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


@contextlib.contextmanager
def catching_signals() -> Iterator[StopRequest]:
    """Turn signals into a StopRequest inside the block. Outside the main thread, handlers stay unchanged."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    with handling((signal.SIGINT, signal.SIGTERM), request.receive):
        yield request
