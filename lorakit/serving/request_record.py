"""Gather what is known of a request while it is answered, for its log line and for the metrics."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from starlette.requests import Request

from lorakit.serving.answer import ChoiceStream

CLIENT_LEFT: Final = 499
"""status of a request whose client left before the answer's end; nginx's"""
RECORD_KEY: Final = "lorakit.record"
"""where a request's scope has its record"""

Answer = TypeVar("Answer")


@dataclass(eq=False)
class RequestRecord:
    """What is known of a request.

    is_counted: its route has metrics. model: as the client wrote it; None: the request names none. served: its
    adapter's name, or the base's; "": neither. prompt: messages or texts as they came. num_prompt_tokens: of the
    prompts that were queued.
    """

    id: str
    method: str
    path: str
    is_counted: bool
    began: float
    model: str | None = None
    served: str = ""
    prompt: Any = None
    num_prompt_tokens: int = 0
    choices: list[ChoiceStream] = field(default_factory=list)
    is_abandoned: bool = False
    status: int = 500
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
    def num_tokens(self) -> int:
        """Tokens that were generated, of all choices."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def first_token_seconds(self) -> float | None:
        """Seconds to the first token of any choice; None: there is none."""
        times = [choice.token_times[0] for choice in self.choices if choice.token_times]
        return min(times) - self.began if times else None


def record_of(request: Request) -> RequestRecord:
    """Return the record of a request."""
    record: RequestRecord = request.scope[RECORD_KEY]
    return record


async def unless_client_leaves(request: Request, work: Coroutine[Any, Any, Answer]) -> Answer | None:
    """Return the result of ``work``; when the client leaves, cancel it, note that, and return None for nobody."""
    task = asyncio.create_task(work)
    leaving = asyncio.create_task(_client_leaves(request))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        record_of(request).status = CLIENT_LEFT
        return None
    finally:
        task.cancel()
        leaving.cancel()
        await asyncio.wait({task, leaving})


async def _client_leaves(request: Request) -> None:
    """Wait until the client of a request, whose body was read, leaves."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
