"""The requests that wait for a slot: each client in turn, and each client's in the order in which they came.

Invariant: the request that is next stays next until it fits, so a large one is not passed over for ever.
"""

import bisect
import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar, final

from lorakit.errors import LorakitError


class Waiting(Protocol):
    """A request that waits. number: of arrival in its queue. client: whose turn it takes."""

    number: int
    client: str | None


Request = TypeVar("Request", bound=Waiting)


class QueueFullError(LorakitError):
    """The queue, or a client's share of it, is full; the same request may be sent again later."""


@final
class RequestQueue(Generic[Request]):
    """Rows that wait. max_rows: of those that did not start yet; None is no limit.

    A client may have as many of them as others would find free: alone half of the queue, beside another a quarter. So
    the first row of a client that has none is refused only when nothing is free.
    Threads may add rows while one thread takes them. ``changed`` is notified of every new row, and is the lock of all.
    """

    def __init__(self, max_rows: int | None = None, changed: threading.Condition | None = None) -> None:
        self._max_rows = max_rows
        self.changed = changed or threading.Condition()
        self._preempted: list[Request] = []  # before all others, the oldest first
        self._numbers = itertools.count()
        self._clients: OrderedDict[str | None, deque[Request]] = OrderedDict()
        """client -> its rows; the client whose turn it is first"""

    def __len__(self) -> int:
        with self.changed:
            return len(self._preempted) + sum(map(len, self._clients.values()))

    def __iter__(self) -> Iterator[Request]:
        with self.changed:
            return iter([*self._preempted, *itertools.chain.from_iterable(self._clients.values())])

    def add(self, *rows: Request) -> None:
        """Add new rows of one client, all or none of them. Raises QueueFullError: too many wait already."""
        with self.changed:
            if self._max_rows is not None and rows:
                waiting = len(self) - len(self._preempted)
                own = len(self._clients.get(rows[0].client, ()))
                if own >= self._max_rows - waiting:
                    raise QueueFullError(f"{waiting} requests wait, {own} of them yours; try again later (max_queue)")
            for row in rows:
                row.number = next(self._numbers)
                self._clients.setdefault(row.client, deque()).append(row)
            self.changed.notify()

    def put_back(self, row: Request) -> None:
        """Add a row that was preempted, before all that did not start yet."""
        with self.changed:
            bisect.insort(self._preempted, row, key=lambda one: one.number)

    def first(self) -> Request | None:
        """Return the row that is next; None if none waits."""
        with self.changed:  # without a list of all, because it is asked at every step
            if self._preempted:
                return self._preempted[0]
            return next((rows[0] for rows in self._clients.values()), None)

    def remove(self, row: Request) -> None:
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
