"""Give up the threads that OpenMP keeps for a thread of Python (decision 0082)."""

import ctypes
from typing import Final

PAUSE_HARD: Final = 2  # omp_pause_hard of OpenMP 5.0


def end_openmp_threads() -> None:
    """End the threads that OpenMP keeps for the calling thread. Its next large operation starts them again.

    For a thread that computes once in a while beside one that decodes: with more such threads than cores, those of all
    wait asleep between operations, and waking them takes longer than a small product.
    """
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)  # of the library that torch loaded
    if pause is not None:
        pause(PAUSE_HARD)
