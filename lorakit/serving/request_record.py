"""Gather what is known of a request while it is answered, for its log line and for the metrics."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from starlette.requests import Request

from lorakit.serving.answer import StreamedAnswer

CLIENT_LEFT: Final = 499
"""status of a request whose client left before the answer's end; nginx's"""
RECORD_KEY: Final = "lorakit.record"
"""where a request's scope has its record"""
DISCONNECT_SECONDS: Final = 0.5
"""between two looks if a client that waits for a full answer is still there"""

Answer = TypeVar("Answer")


@dataclass(eq=False)
class RequestRecord:
    """What is known of a request.

    model: as the client wrote it; None: nothing was generated or asked of a model. served: its adapter's name, or the
    base's; "": neither. prompt: messages or texts as they came.
    """

    id: str
    method: str
    path: str
    began: float
    model: str | None = None
    served: str = ""
    prompt: Any = None
    num_prompt_tokens: int = 0
    answers: list[StreamedAnswer] = field(default_factory=list)
    status: int = 500
    seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens that were generated, of all choices."""
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def first_token_seconds(self) -> float | None:
        """Seconds to the first token of any choice; None: there is none."""
        times = [answer.token_times[0] for answer in self.answers if answer.token_times]
        return min(times) - self.began if times else None


def record_of(request: Request) -> RequestRecord:
    """Return the record of a request."""
    record: RequestRecord = request.scope[RECORD_KEY]
    return record


async def unless_client_leaves(request: Request, work: Coroutine[Any, Any, Answer]) -> Answer | None:
    """Return the result of ``work``; when the client leaves, cancel it, note that, and return None for nobody."""
    task = asyncio.create_task(work)
    while not (await asyncio.wait({task}, timeout=DISCONNECT_SECONDS))[0]:
        if await request.is_disconnected():
            task.cancel()
            await asyncio.wait({task})
            record_of(request).status = CLIENT_LEFT
            return None
    return task.result()
