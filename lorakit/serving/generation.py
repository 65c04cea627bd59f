"""One request on its way through the engine, and what its caller sees of it."""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, final

from lorakit.errors import LorakitError
from lorakit.lora.routing import Adapter
from lorakit.serving.sampling import Sampler, SamplingSettings, TokenLogprobs

STOP: Final = "stop"
"""reason to finish: an end token"""
LENGTH: Final = "length"
"""reason to finish: max_tokens"""
CANCELLED: Final = "cancelled"
"""reason to finish: its caller, or the end of the engine"""


@dataclass(frozen=True)
class Token:
    """One generated token."""

    id: int
    logprobs: TokenLogprobs | None = None


Item = Token | Exception | None
"""a token, what ended the request, or None at its end"""


@final
class Generation:
    """The tokens of one request, while they come. Iterate over it once, in one thread.

    reason: why it finished; None while it runs. adapter: as it was when the request came, whatever is loaded since.
    deliver: called in the engine's thread with every item, instead of the iteration.
    """

    def __init__(
        self,
        adapter: Adapter | None,
        prompt: list[int],
        settings: SamplingSettings,
        deliver: Callable[[Item], None] | None = None,
    ) -> None:
        self.adapter, self.prompt, self.settings = adapter, prompt, settings
        self.reason: str | None = None
        self._tokens: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._deliver = deliver or self._tokens.put
        self._cancelled = threading.Event()

    def __iter__(self) -> Iterator[Token]:
        """Yield the tokens without the end token.

        Raises:
            LorakitError: the engine failed on this request, or was closed.
        """
        while (item := self._tokens.get()) is not None:
            if isinstance(item, Exception):
                raise LorakitError(f"the request failed: {type(item).__name__}: {item}") from item
            yield item

    def ids(self) -> list[int]:
        """Wait for the full answer, and return its token ids."""
        return [token.id for token in self]

    def cancel(self) -> None:
        """End it before its next token. Its slot is free then."""
        self._cancelled.set()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def put(self, token: Token) -> None:
        """Give a token to the caller; for the engine."""
        self._deliver(token)

    def finish(self, reason: str) -> None:
        """End the answer; for the engine."""
        self.reason = reason
        self._deliver(None)

    def fail(self, problem: Exception) -> None:
        """End it with an error; for the engine."""
        self._deliver(problem)


@dataclass(eq=False)
class Row:
    """A generation in the engine's batch.

    num_stored: tokens whose keys and values are in its slot. pending: the tokens that are computed next: of the prompt,
    or the one that was drawn last.
    """

    generation: Generation
    sampler: Sampler
    pending: list[int]
    num_stored: int = 0
    num_generated: int = 0
    ends: frozenset[int] = field(default_factory=frozenset)
