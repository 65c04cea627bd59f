"""Count the units of work that this process has done, so that slow work can be distinguished from none.

A micro-batch, a chunk of rows, a file, a tensor and an answer are units. The count is the process's, like its CPU time.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Final

CPU_SECONDS: Final = 5.0
"""computed for a library's call, and counted as a unit; a process that only waits needs an hour for them"""

_num_units = 0
_num_calls = 0


def report_progress() -> None:
    """Count one unit of work, in any thread."""
    global _num_units
    _num_units += 1


@contextlib.contextmanager
def library_call() -> Iterator[None]:
    """Count CPU time as work in the block, for a library's call. Not for waits on ranks, in which backends compute."""
    global _num_calls
    _num_calls += 1
    try:
        yield
    finally:
        _num_calls -= 1


def progress_count() -> int:
    """Return a number that has changed if this process has done work since the last call."""
    return _num_units + (int(time.process_time() / CPU_SECONDS) if _num_calls else 0)
