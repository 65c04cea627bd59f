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
