"""Follow one choice of a request: its text in pieces, while the engine computes its tokens."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import final

from lorakit.decoding.generation import CANCELLED, LENGTH, STOP, Generation, Item
from lorakit.decoding.sampling import TokenLogprobs
from lorakit.errors import LorakitError
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.lora.routing import Adapter
from lorakit.serving.detokenizer import Detokenizer
from lorakit.serving.engine import ServingEngine
from lorakit.serving.openai_requests import CompletionRequest, RequestError


@dataclass(frozen=True)
class Piece:
    """Text that is certain after one more token, or the prompt of an echo.

    tokens: (id, log-probabilities) of each token in it, if they are wanted; a prompt's first token has none.
    reason: why the answer ends here; None: it goes on. end: the end token like one of ``tokens``; None: there is none.
    """

    text: str
    tokens: tuple[tuple[int, TokenLogprobs | None], ...] = ()
    reason: str | None = None
    end: tuple[int, TokenLogprobs] | None = None


@final
class StreamedAnswer:
    """One choice of a request.

    index: of the choice among those of one prompt. client: whose turn it is. adapter: as it was when the request came.
    echo: the prompt, which comes before the answer; None: it is not wanted. token_times: when each token was computed,
    by ``time.monotonic``. reason: why it ended; None: it did not.
    """

    def __init__(
        self,
        engine: ServingEngine,
        model: AdaptedModel,
        ids: list[int],
        adapter: Adapter | None,
        request: CompletionRequest,
        *,
        index: int = 0,
        client: str | None = None,
    ) -> None:
        loop, self._items = asyncio.get_running_loop(), asyncio.Queue[Item]()
        self.ids, self.adapter, self.num_tokens = ids, adapter, 0
        codec = model.codec(adapter)
        self.echo: Piece | None = None
        self.reason: str | None = None
        self.token_times: list[float] = []
        settings = request.settings_of(len(ids), engine.max_positions, index)

        def put(item: Item) -> None:  # in the engine's thread
            if item is not None and not isinstance(item, Exception):
                self.token_times.append(time.monotonic())
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits
                loop.call_soon_threadsafe(self._items.put_nowait, item)

        self.generation: Generation | None = None
        if request.echo and settings.max_tokens == 0:  # the prompt alone, as for its log-probabilities
            replace(settings, max_tokens=1).check(codec.num_tokens)
            codec.check_ids([ids], 0)
        else:
            self.generation = engine.submit(ids, adapter, settings, put, client)
        self._detokenizer = Detokenizer(codec.tokenizer, request.settings.stop)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt whose keys and values were there already."""
        return 0 if self.generation is None else self.generation.cached_tokens

    def cancel(self) -> None:
        """Free the engine's row."""
        if self.generation is not None:
            self.generation.cancel()

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield the text; the last piece has a reason. Leaving early frees the engine's row."""
        if self.echo is not None:
            yield self.echo
        if self.generation is None:
            self.reason = LENGTH
            yield Piece("", (), LENGTH)
            return
        try:
            while (item := await self._items.get()) is not None:
                if isinstance(item, LorakitError):  # of its fields: a grammar that grew too large
                    raise RequestError(str(item))
                if isinstance(item, Exception):
                    raise RequestError(f"the engine failed on this request: {type(item).__name__}", status=500)
                self.num_tokens += 1
                text, stopped = self._detokenizer.add(item.id)
                tokens = () if item.logprobs is None else ((item.id, item.logprobs),)
                if stopped:
                    self.reason = STOP
                    yield Piece(text, tokens, STOP)
                    return
                yield Piece(text, tokens)
            if self.generation.reason == CANCELLED:  # by the end of the engine, because nobody here did
                raise RequestError("the server ended before the answer; ask again", status=503)
            self.reason, end = self.generation.reason, self.generation.end
            wanted = None if end is None or end.logprobs is None else (end.id, end.logprobs)
            yield Piece(self._detokenizer.finish(), (), self.reason, wanted)
        finally:
            self.generation.cancel()
