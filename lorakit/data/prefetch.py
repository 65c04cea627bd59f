"""Collate the micro-batches of the next step in a thread while the engine computes the current one."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import final

from lorakit.data.batch import Batch
from lorakit.data.sampler import BatchSampler


@final
class Prefetcher:
    """The steps of a BatchSampler, collated one step ahead. Each step has the rows that the sampler gives it."""

    def __init__(self, batches: BatchSampler, total_steps: int) -> None:
        self._batches, self._total_steps = batches, total_steps
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._next: tuple[int, Future[list[Batch]]] | None = None

    def step(self, step: int) -> list[Batch]:
        """Return the micro-batches of a step (counted from 0). Errors of the thread are raised here."""
        next_step, future = self._next or (None, None)
        if future is None or next_step != step:  # the first step, or a run that went back to an earlier one
            future = self._thread.submit(self._batches.step, step)
        micro_batches = future.result()
        if step + 1 < self._total_steps:
            self._next = (step + 1, self._thread.submit(self._batches.step, step + 1))
        return micro_batches

    def close(self) -> None:
        """End the thread and drop its unused result."""
        self._thread.shutdown(wait=True, cancel_futures=True)
