"""The next step's micro-batches are made while this one computes."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import final

from lorakit.data.batch import Batch
from lorakit.data.sampler import BatchSampler


@final
class Prefetcher:
    """The steps of ``batches``, one ahead of the last that was asked for. What a step holds does not depend on it."""

    def __init__(self, batches: BatchSampler, total_steps: int) -> None:
        self._batches, self._total = batches, total_steps
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._next: tuple[int, Future[list[Batch]]] | None = None

    def step(self, step: int) -> list[Batch]:
        """The micro-batches of a step (counted from 0). Errors of making them are raised here."""
        known, made = self._next or (None, None)
        found = made.result() if made is not None and known == step else self._maker.submit(self._make, step).result()
        if step + 1 < self._total:
            self._next = (step + 1, self._maker.submit(self._make, step + 1))
        return found

    def _make(self, step: int) -> list[Batch]:
        return self._batches.step(step)

    def close(self) -> None:
        """End the thread; what it was making is thrown away."""
        self._maker.shutdown(wait=True, cancel_futures=True)
