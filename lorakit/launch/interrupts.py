"""End this process at once on a signal that arrives while modules are imported.

An exception of a handler is no way out there: libraries catch everything around their imports, so it is lost, or comes
back as "could not import module".
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Final

from lorakit.errors import TemporaryFailure
from lorakit.launch.workers import send_failure_message

IMPORT_FILE: Final = "<frozen importlib._bootstrap>"  # that of every import's own frames
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
    """Have a function handle signals inside the block, and the handlers from before after it."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)


@contextmanager
def interrupts_end_imports(text: str) -> Iterator[None]:
    """Let Ctrl-C end imports inside the block with a line of text; elsewhere it raises KeyboardInterrupt as before."""

    def receive(number: int, frame: FrameType | None) -> None:
        exit_if_importing(frame, text)
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # nohup ignores it
        yield
        return
    with handling([signal.SIGINT], receive):
        yield
