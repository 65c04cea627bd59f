"""What is known of a request while it is answered, for its log line and for the metrics, and the log itself."""

import asyncio
import contextlib
import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, TypeVar, final

from starlette.requests import ClientDisconnect, Request

from lorakit.serving.answer import ChoiceStream
from lorakit.serving.errors import RequestError

CLIENT_LEFT: Final = 499  # status of a request whose client left before the answer's end; nginx's
RECORD_KEY: Final = "lorakit.record"  # where a request's scope has its record
MAX_LINES: Final = 10_000  # of a log that wait to be written
CLOSE_SECONDS: Final = 2.0  # for which the end of a log waits for its lines

Answer = TypeVar("Answer")
Log = Callable[[Mapping[str, Any]], None]  # writes one line


@dataclass(eq=False)
class RequestRecord:
    """What is known of a request."""

    id: str
    method: str
    path: str
    is_counted: bool  # its route has metrics
    began: float
    client: str | None = None  # whose turn it takes in the queue
    model: str | None = None  # as the client wrote it, also of an adapter to load or unload; None: it names none
    served: str = ""  # its adapter's name, or the base's; "": neither
    prompt: Any = None  # messages or texts as they came
    prompt_field: str = "prompts"  # that they came in
    num_prompt_tokens: int = 0  # of the prompts that were queued
    choices: list[ChoiceStream] = field(default_factory=list)
    is_abandoned: bool = False
    status: int = 500
    error: RequestError | None = None  # why it failed; None: it did not, or its client left
    seconds: float = 0.0

    def add(self, choice: ChoiceStream) -> None:
        """Add a choice that the engine has; in any thread."""
        self.choices.append(choice)
        if self.is_abandoned:
            choice.cancel()

    def abandon(self) -> None:
        """Free the rows of all choices, also of those that a thread is about to add."""
        self.is_abandoned = True
        for choice in self.choices:
            choice.cancel()

    @property
    def has_begun(self) -> bool:
        """True if there is a token of it; inputs to embed have begun when they are queued."""
        return self.first_token_seconds is not None or (self.num_prompt_tokens > 0 and not self.choices)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of its prompts, read from the prefix cache by the first choice of each, as in its usage."""
        first_of = {id(choice.ids): choice.generation for choice in reversed(self.choices)}
        return sum(one.cached_tokens or 0 for one in first_of.values() if one is not None)

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def first_token_seconds(self) -> float | None:
        """Seconds to the first token of any choice; None: there is none."""
        times = [choice.token_times[0] for choice in self.choices if choice.token_times]
        return min(times) - self.began if times else None


def record_of(request: Request) -> RequestRecord:
    return request.scope[RECORD_KEY]


async def unless_client_leaves(request: Request, work: Coroutine[Any, Any, Answer]) -> Answer:
    """Return the result of ``work``. Raises ClientDisconnect: the client left, and ``work`` is cancelled."""
    task = asyncio.create_task(work)
    leaving = asyncio.create_task(_client_leaves(request))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        leaving.cancel()
        await asyncio.wait({task, leaving})


async def _client_leaves(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def json_line(content: Mapping[str, Any]) -> str:
    """Return an event and its time as one line of JSON; what clients wrote cannot begin another line."""
    time_now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": time_now, **content}, ensure_ascii=True) + "\n"


@final
class LineLog(logging.Handler):
    """Writes events as lines to a file descriptor, in a thread, because nobody may read what it leads to.

    A line that cannot be written, as on a full disk or where too many wait, stops nothing. num_lost: their number. The
    first in a row that the system refuses is reported on standard output. As a handler of loggers it makes events of
    their lines.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(logging.WARNING)
        self._descriptor = descriptor
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_LINES)
        self.num_lost = 0
        self._is_cut = False
        self._works = True
        self._thread = threading.Thread(target=self._write_all, name="lorakit log", daemon=True)
        self._thread.start()

    def __call__(self, content: Mapping[str, Any]) -> None:
        try:
            self._lines.put_nowait(json_line(content))
        except queue.Full:
            self.num_lost += 1

    def close(self) -> None:
        """Wait until the lines so far are written, unless somebody does not read them."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=CLOSE_SECONDS)
            self._thread.join(CLOSE_SECONDS)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        self({"event": self.format(record)})  # with the traceback, if it has one

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            left = ("\n" * self._is_cut + line).encode()  # after a cut line, one of its own
            try:
                while left:
                    left = left[os.write(self._descriptor, left) :]
                    self._is_cut = bool(left)
                self._works = True
            except OSError as problem:
                self.num_lost += 1
                if self._works:
                    event = {"event": "the log cannot be written", "error": str(problem)}
                    with contextlib.suppress(OSError):
                        os.write(1, json_line(event).encode())
                self._works = False
