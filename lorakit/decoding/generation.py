"""One request in the engine's batch with the tokens that its caller reads, and the queue of requests without a slot.

Invariant: the request that is next stays next until it fits, so a large one is not passed over for ever. Each client
has its turn, and each client's requests come in their own order.
"""

import bisect
import itertools
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar, final

from lorakit.decoding.grammar import Grammar
from lorakit.decoding.sampling import Sampler, SamplingSettings, Token
from lorakit.errors import LorakitError
from lorakit.slots.routing import Adapter

STOP: Final = "stop"  # reason to finish: an end token
LENGTH: Final = "length"  # reason to finish: max_tokens
CANCELLED: Final = "cancelled"  # reason to finish: its caller, or the end of the engine
ERROR: Final = "error"  # reason to finish: the engine failed on it
Item = Token | Exception | None  # a token, what ended the request, or None at its end


@final
@dataclass(eq=False)
class Generation:
    """One request and its tokens, while they come. Its caller iterates over it once, in one thread.

    deliver: called in the engine's thread with every item, instead of the iteration. on_end: called there at the end.
    """

    adapter: Adapter | None  # as it was when the request came, whatever is loaded since
    prompt: list[int]
    settings: SamplingSettings
    ends: frozenset[int] = frozenset()  # tokens that end the answer
    grammar: Grammar | None = None
    client: str | None = None  # whose turn it takes in the queue
    deliver: Callable[[Item], None] | None = None
    on_end: Callable[[], None] | None = None
    reason: str | None = None  # why it finished; None while it runs
    end: Token | None = None  # the end token, which is no part of the answer
    cached_tokens: int | None = None  # of the prompt, read from the prefix cache; None before its first prefill
    number: int = 0  # of arrival
    num_stored: int = 0  # tokens that have keys and values in its slot
    planned: frozenset[bytes] = frozenset()  # blocks of the prefix cache that were missing when it got its slot
    is_cancelled: bool = False

    def __post_init__(self) -> None:
        self.sampler = Sampler(self.settings, self.prompt, self.ends, self.grammar)
        self.tokens = list(self.prompt)  # and those that were drawn
        self.num_tokens_at_most = len(self.prompt) + self.settings.max_tokens
        self._items = queue.SimpleQueue[Item]()
        self._deliver = self.deliver or self._items.put

    def __iter__(self) -> Iterator[Token]:
        """Yield the tokens without the end token. Raises LorakitError: the engine failed on the request, or ended."""
        while (item := self._items.get()) is not None:
            if isinstance(item, Exception):
                raise LorakitError(f"the request failed: {type(item).__name__}: {item}") from item
            yield item

    def ids(self) -> list[int]:
        return [token.id for token in self]

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.num_stored

    def cancel(self) -> None:
        """End it before its next token. Its slot is free then."""
        self.is_cancelled = True

    def finish(self, reason: str, problem: Exception | None = None) -> None:
        """End the answer, with the problem of an error; for the engine."""
        self.reason = reason
        self.put(problem)
        if self.on_end is not None:
            self.on_end()

    def put(self, item: Item) -> None:
        """Give a token, an error or the end to the caller; for the engine."""
        try:
            self._deliver(item)
        except Exception:  # such as a closed event loop: nobody can take an answer there
            self.cancel()


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
