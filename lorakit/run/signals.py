"""SIGINT and SIGTERM: finish the step, save, exit 75. A second SIGINT stops at once.

SIGTERM counts once however often it comes: schedulers send it again while a run is saving.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from lorakit.errors import TemporaryFailure


class StopRequest:
    """Whether a signal asked the run to stop. ``patient``: the loop will look; otherwise stop where we are."""

    def __init__(self) -> None:
        self.deferred = False
        self.asked_by: str | None = None

    def asked(self) -> bool:
        return self.asked_by is not None

    def wait(self) -> None:
        """From here on a signal interrupts nothing."""
        self.deferred = True

    def receive(self, number: int, frame: FrameType | None) -> None:
        again, self.asked_by = self.asked() and number == signal.SIGINT, signal.Signals(number).name
        if again or not self.deferred:
            raise TemporaryFailure(
                f"stopped at once by {self.asked_by}; the same command goes on from the last checkpoint"
            )


@contextlib.contextmanager
def catching_signals() -> Iterator[StopRequest]:
    """Signals become a StopRequest inside the block (in the main thread; elsewhere they are left alone)."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, request.receive) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
