"""One request in the engine's batch, and the tokens that its caller reads."""

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, final

from lorakit.decoding.sampling import Sampler, SamplingSettings, TokenLogprobs
from lorakit.errors import LorakitError
from lorakit.slots.routing import Adapter

STOP: Final = "stop"  # reason to finish: an end token
LENGTH: Final = "length"  # reason to finish: max_tokens
CANCELLED: Final = "cancelled"  # reason to finish: its caller, or the end of the engine
ERROR: Final = "error"  # reason to finish: the engine failed on it


@dataclass(frozen=True)
class Token:
    id: int
    logprobs: TokenLogprobs | None = None


Item = Token | Exception | None  # a token, what ended the request, or None at its end


@final
class Generation:
    """The tokens of one request, while they come. Iterate over it once, in one thread.

    reason: why it finished; None while it runs. end: the end token, which is no part of the answer. adapter: as it was
    when the request came, whatever is loaded since. deliver: called in the engine's thread with every item, instead of
    the iteration. on_end: called in the engine's thread once the answer has ended.
    cached_tokens: of the prompt, read from the prefix cache; known with the first token.
    """

    def __init__(
        self,
        adapter: Adapter | None,
        prompt: list[int],
        settings: SamplingSettings,
        deliver: Callable[[Item], None] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        self.adapter = adapter
        self.prompt = prompt
        self.settings = settings
        self.reason: str | None = None
        self.end: Token | None = None
        self.cached_tokens = 0
        self._tokens: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._deliver = deliver or self._tokens.put
        self._on_end = on_end
        self.is_cancelled = False

    def __iter__(self) -> Iterator[Token]:
        """Yield the tokens without the end token. Raises LorakitError: the engine failed on the request, or ended."""
        while (item := self._tokens.get()) is not None:
            if isinstance(item, Exception):
                raise LorakitError(f"the request failed: {type(item).__name__}: {item}") from item
            yield item

    def ids(self) -> list[int]:
        return [token.id for token in self]

    def cancel(self) -> None:
        """End it before its next token. Its slot is free then."""
        self.is_cancelled = True

    def finish(self, reason: str) -> None:
        """End the answer; for the engine."""
        self.reason = reason
        self.put(None)
        if self._on_end is not None:
            self._on_end()

    def fail(self, problem: Exception) -> None:
        """End it with an error; for the engine."""
        self.reason = ERROR
        self.put(problem)

    def put(self, item: Item) -> None:
        """Give a token, an error or the end to the caller; for the engine."""
        try:
            self._deliver(item)
        except Exception:  # such as a closed event loop: nobody can take an answer there
            self.cancel()


@dataclass(eq=False)
class RunningRequest:
    """A generation in the engine's batch, in its queue, or between the two.

    number: of arrival. tokens: of the prompt, and those that were drawn. num_stored: how many of them have keys and
    values in the row's slot. client: whose turn it takes in the queue. is_started: False until its first prefill.
    """

    generation: Generation
    sampler: Sampler
    tokens: list[int]
    ends: frozenset[int] = frozenset()
    number: int = 0
    client: str | None = None
    num_stored: int = 0
    is_started: bool = False

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.num_stored

    @property
    def num_tokens_at_most(self) -> int:
        return len(self.generation.prompt) + self.generation.settings.max_tokens
