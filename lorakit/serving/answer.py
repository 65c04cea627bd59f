"""Follow one choice of a request: its text in pieces, while the engine computes its tokens.

Invariant: the pieces joined are the decoded answer. No piece ends inside a character, or with what may be the beginning
of a stop text. The work of a token does not grow with the answer.
"""

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

from lorakit.decoding.generation import CANCELLED, LENGTH, STOP, Generation, Item
from lorakit.decoding.sampling import SamplingSettings, Token
from lorakit.errors import LorakitError
from lorakit.inference.answer_form import AnswerPart, num_begun
from lorakit.inference.answer_parser import AnswerParser
from lorakit.inference.prompts import REPLACEMENT, PromptCodec, tokens_before
from lorakit.serving.engine import ServingEngine
from lorakit.serving.errors import RequestError
from lorakit.slots.routing import Adapter

MAX_PENDING_TOKENS: Final = 8
"""that may wait for the rest of a character; UTF-8 has 4 bytes at most, so after more of them it is broken"""
TOKEN_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)  # bounds of times between tokens


@dataclass(frozen=True)
class Delta:
    """The parts of the text that are certain after one more token, or the prompt of an echo."""

    parts: Sequence[AnswerPart] = ()
    tokens: Sequence[Token] = ()  # in it, if log-probabilities are requested; a prompt's first token has none
    reason: str | None = None  # why the answer ends here; None: it goes on
    end: Token | None = None  # the end token like one of ``tokens``, if there is one


@final
@dataclass(eq=False)
class ChoiceStream:
    """One choice of a request."""

    ids: list[int]  # of its prompt
    adapter: Adapter | None  # as it was when the request came
    codec: PromptCodec
    settings: SamplingSettings
    parser: AnswerParser | None = None
    echo: Delta | None = None  # the prompt, before the answer; None: it is not requested
    offsets: list[int] = field(default_factory=list)  # characters of the text before each of its tokens
    num_tokens: int = 0
    reason: str | None = None  # why the answer ended; None: it did not
    token_times: list[float] = field(default_factory=list)  # of the first and the last one, by ``time.monotonic``
    num_between: list[int] = field(default_factory=lambda: [0] * (len(TOKEN_SECONDS) + 1))  # times, by bound
    generation: Generation | None = None

    def __post_init__(self) -> None:
        marks = () if self.parser is None else self.codec.answer_form.texts
        self._detokenizer = Detokenizer(self.codec.tokenizer, self.settings.stop, marks, self.ids)

    def start(self, engine: ServingEngine, deliver: "Deliver", client: str | None = None) -> None:
        """Queue the request, whose items the engine's thread delivers. Compiles a grammar: not in an event loop."""

        def put(item: Item) -> None:
            if isinstance(item, Token):
                now = time.monotonic()
                if self.token_times:
                    self.num_between[bisect_left(TOKEN_SECONDS, now - self.token_times[-1])] += 1
                self.token_times[1:] = [now]
            deliver((self, item))

        self.generation = engine.submit(self.ids, self.adapter, self.settings, put, client)

    def cancel(self) -> None:
        if self.generation is not None:
            self.generation.cancel()

    def begin(self) -> list[Delta]:
        """Return the text before the first item: the echo, and the end of an answer that is an echo alone."""
        deltas = []
        if self.echo is not None:
            self._detokenizer.num_characters = sum(len(part.text) for part in self.echo.parts)
            deltas.append(self.echo)
        if self.generation is None:
            self.reason = LENGTH
            deltas.append(Delta(reason=LENGTH))
        return deltas

    def add(self, item: Item) -> Delta:
        """Return the text that is certain after one more item. The last delta has a reason; the row is free then."""
        assert self.generation is not None
        if isinstance(item, LorakitError):  # of its fields: a grammar that grew too large
            raise RequestError(str(item))
        if isinstance(item, Exception):
            raise RequestError(f"the engine failed on this request: {type(item).__name__}", status=500)
        if item is None and self.generation.reason == CANCELLED:  # by the end of the engine, because nobody here did
            raise RequestError("the server ended before the answer; ask again", status=503)
        self.offsets.append(self._detokenizer.num_characters)
        if item is None:
            text, is_stopped = self._detokenizer.finish()
            self.reason = STOP if is_stopped else self.generation.reason
            end = self.generation.end
            return self._delta(text, end=None if end is None or end.logprob is None else end)
        self.num_tokens += 1
        text, is_stopped = self._detokenizer.add(item.id)
        if is_stopped:
            self.reason = STOP
            self.cancel()
        return self._delta(text, () if item.logprob is None else (item,))

    def _delta(self, text: str, tokens: Sequence[Token] = (), end: Token | None = None) -> Delta:
        parts = [AnswerPart("content", text)] if text else []
        if self.parser is not None:
            parts = self.parser.add(text)
            if self.reason is not None:
                parts += self.parser.finish()
            elif self.parser.is_done:
                self.reason = STOP
                self.cancel()
        return Delta(parts, tokens, self.reason, end)


Delivery = tuple[ChoiceStream, Item]
Deliver = Callable[[Delivery], object]
Deliveries = asyncio.Queue[Delivery]


@final
class Detokenizer:
    """The text of one answer to a prompt's tokens.

    stop: texts that end it. marks: texts whose special tokens are part of it. num_characters: complete ones so far.
    Not `tokenizers.decoders.DecodeStream`, which raises an error at bytes that are no UTF-8 (decision 64).
    """

    def __init__(
        self, tokenizer: Any, stop: Sequence[str] = (), marks: Sequence[str] = (), prompt: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items() if marks else ()
        shown = {number for number, token in added if any(token.content in mark for mark in marks)}
        self._special = frozenset(tokenizer.all_special_ids) - shown
        self._stops = stop
        self._ids = tokens_before(tokenizer, prompt)
        """the last tokens whose text was complete, and those after them, whose text may not be"""
        self._num_complete = len(self._ids)  # tokens of ``_ids`` whose text was complete
        self._complete = self._decode(self._ids)  # their text, when they are decoded alone
        self.num_characters = 0
        self._withheld = ""  # text that may begin a stop text

    def add(self, token: int) -> tuple[str, bool]:
        """Return the text that is certain after one more token, and True if a stop text has come."""
        if token in self._special:
            return "", False
        self._ids.append(token)
        text = self._decode(self._ids)
        is_broken = len(self._ids) - self._num_complete > MAX_PENDING_TOKENS
        if not is_broken and (text.endswith(REPLACEMENT) or len(text) <= len(self._complete)):
            return "", False
        new = text[len(self._complete) :]
        self.num_characters += len(new)
        # the new tokens stay, because a token's text depends on those before it: sentencepiece's first has no space
        self._ids = self._ids[self._num_complete :]
        self._num_complete = len(self._ids)
        self._complete = self._decode(self._ids)
        return self._until_stop(new)

    def finish(self) -> tuple[str, bool]:
        """Return the rest of the text, when no more tokens come, and True if a stop text ends it."""
        text, is_stopped = self._until_stop(self._decode(self._ids)[len(self._complete) :])
        return text if is_stopped else text + self._withheld, is_stopped

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def _until_stop(self, new: str) -> tuple[str, bool]:
        """Return the text that is certain after ``new``, and True if a stop text is complete."""
        text = self._withheld + new
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:  # the one that ends first, and of several the longest
            return text[: min(matches)[1]], True
        num_certain = len(text) - max((num_begun(text, stop) for stop in self._stops), default=0)
        self._withheld = text[num_certain:]
        return text[:num_certain], False
