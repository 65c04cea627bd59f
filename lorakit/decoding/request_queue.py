"""The requests that wait for a slot: each client in turn, and each client's in the order in which they came.

Invariant: the request that is next stays next until it fits, so a large one is not passed over for ever.
"""

import bisect
import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import final

from lorakit.decoding.generation import Row
from lorakit.errors import LorakitError


class QueueFullError(LorakitError):
    """The queue has its largest number of requests; the same request may be sent again later."""


@final
class RequestQueue:
    """Rows that wait. max_rows: of those that did not start yet; None is no limit.

    Threads may add rows while one thread takes them. ``changed`` is notified of every new row, and is the lock of all.
    """

    def __init__(self, max_rows: int | None = None) -> None:
        self._max_rows = max_rows
        self.changed = threading.Condition()
        self._preempted: list[Row] = []
        """before all others, the oldest first"""
        self._clients: OrderedDict[str | None, deque[Row]] = OrderedDict()
        """client -> its rows; the client whose turn it is first"""

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Row]:
        with self.changed:
            return iter([*self._preempted, *itertools.chain.from_iterable(self._clients.values())])

    def add(self, row: Row) -> None:
        """Add a new row.

        Raises:
            QueueFullError: too many wait.
        """
        with self.changed:
            if self._max_rows is not None and len(self) - len(self._preempted) >= self._max_rows:
                raise QueueFullError(f"{self._max_rows} requests wait already (max_queue); send it again later")
            self._clients.setdefault(row.client, deque()).append(row)
            self.changed.notify()

    def put_back(self, row: Row) -> None:
        """Add a row that was preempted, before all that did not start yet."""
        with self.changed:
            bisect.insort(self._preempted, row, key=lambda one: one.number)

    def first(self) -> Row | None:
        """Return the row that is next; None if none waits."""
        return next(iter(self), None)

    def remove(self, row: Row) -> None:
        """Remove a row. If it was next, another client's turn is next."""
        with self.changed:
            was_next = row is self.first()
            if row in self._preempted:
                self._preempted.remove(row)
                return
            rows = self._clients[row.client]
            rows.remove(row)
            if not rows:
                del self._clients[row.client]
            elif was_next:
                self._clients.move_to_end(row.client)
