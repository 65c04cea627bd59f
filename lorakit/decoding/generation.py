"""One request in the engine's batch, and the tokens that its caller reads."""

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, final

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

    adapter: as it was when the request came, whatever is loaded since. ends: tokens that end the answer. client: whose
    turn it takes in the queue. deliver: called in the engine's thread with every item, instead of the iteration.
    on_end: called in the engine's thread once the answer has ended.
    reason: why it finished; None while it runs. end: the end token, which is no part of the answer. cached_tokens: of
    the prompt, read from the prefix cache; None before its first prefill.
    number: of arrival. tokens: of the prompt, and those that were drawn. num_stored: how many of them have keys and
    values in its slot.
    """

    adapter: Adapter | None
    prompt: list[int]
    settings: SamplingSettings
    ends: frozenset[int] = frozenset()
    grammar: Grammar | None = None
    client: str | None = None
    deliver: Callable[[Item], None] | None = None
    on_end: Callable[[], None] | None = None
    reason: str | None = None
    end: Token | None = None
    cached_tokens: int | None = None
    number: int = 0
    num_stored: int = 0
    is_cancelled: bool = False

    def __post_init__(self) -> None:
        self.sampler = Sampler(self.settings, self.prompt, self.ends, self.grammar)
        self.tokens = list(self.prompt)
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
