"""Give up the threads that OpenMP keeps for a thread of Python, and limit how long they spin (decision 0082)."""

import ctypes
import os
from collections.abc import MutableMapping
from typing import Final

PAUSE_HARD: Final = 2  # omp_pause_hard of OpenMP 5.0


def limit_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let GNU OpenMP's threads sleep soon when they wait for each other. It is read when torch is imported.

    For a process whose other threads compute too. By default one that waits keeps its core for milliseconds, in which
    the one that it waits for may have none: steps of 3 ms took 140 ms while a text of 1 MB was tokenised on two cores.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", "10000")  # some tens of microseconds


def end_openmp_threads() -> None:
    """End the threads that OpenMP keeps for the calling thread. Its next large operation starts them again.

    With more of them than cores, all wait asleep between operations, and waking them takes longer than small products.
    """
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)  # of the library that torch loaded
    if pause is not None:
        pause(PAUSE_HARD)
