"""Answer requests of many threads with one batch: check each request; a thread of its own computes step after step."""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Final, final

from torch import Tensor

from lorakit.base.layers import num_steady_positions
from lorakit.decoding.batch import PREFILL_TOKENS, ContinuousBatch
from lorakit.decoding.embedding import Embedder, EmbeddingInput
from lorakit.decoding.generation import Generation, Item
from lorakit.decoding.kv_memory import KvMemory
from lorakit.decoding.sampling import SamplingSettings
from lorakit.decoding.slot_model import SlotModel
from lorakit.errors import ContextLengthError, LorakitError, TemporaryFailure
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.ops.openmp import end_openmp_threads
from lorakit.patch.pooling import Pooling
from lorakit.slots.routing import Adapter

LEAST_POSITIONS: Final = 17  # of a text of one token, and of its answer if the request does not say how long
CHAT_TOKENS: Final = 1024  # tokens of a chat's answer, if the request does not say; bounded, so that its slot is
Chosen = Adapter | str | None  # an adapter, or the name of one that is loaded; None: the base


@final
class ServingEngine:
    """One base with its adapters, and the rows that it decodes together.

    max_rows: of a batch. kv_memory_bytes: of running rows and common prefixes. max_positions: the same limit in tokens;
    the lower one holds. max_queue: requests that wait for their start, half of them of one client (``RequestQueue``).
    """

    def __init__(
        self,
        model: AdaptedModel,
        *,
        max_rows: int = 16,
        kv_memory_bytes: int = 1 << 30,
        max_positions: int | None = None,
        max_queue: int = 2048,
    ) -> None:
        self._model = model
        slots = SlotModel(model)
        self.note = slots.note
        self.takes_parts = slots.takes_parts
        end_openmp_threads()  # from here on the engine's thread computes
        self._steady_positions = num_steady_positions(model.model.config) or math.inf
        self._memory = KvMemory(slots.cache, kv_memory_bytes, max_positions)
        if self._memory.longest < LEAST_POSITIONS:
            room = f"{self._memory.longest} tokens of this base, {self._memory.position_bytes} bytes each"
            need = f"a text and its answer need {LEAST_POSITIONS} at least"
            raise LorakitError(f"--kv-memory, --kv-positions: keys and values of {room}; {need}")
        # tokens of the longest prompt with its answer
        self.max_positions = min(model.prompts.limit, self._memory.longest, self._steady_positions)
        self.max_waiting = (max_queue + 1) // 2  # of one client
        self._batch = ContinuousBatch(slots, self._memory, max_rows, max_queue)
        self._changed = self._batch.waiting.changed
        self.finished = self._batch.finished
        self.totals = self._batch.totals
        self._embedder = Embedder(model, self._changed, max_queue, takes_parts=slots.takes_parts)
        self._closed = False
        self._step_began: float | None = None
        self._thread = threading.Thread(target=self._loop, name="lorakit engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: list[int],
        adapter: Chosen = None,
        settings: SamplingSettings | None = None,
        deliver: Callable[[Item], None] | None = None,
        client: str | None = None,
    ) -> Generation:
        """Queue a request, and return its generation at once. ``deliver``: as of ``Generation``.

        adapter: the one whose tokenizer made the prompt, or its name. client: who sent it; clients take turns.
        Raises QueueFullError. TemporaryFailure: the engine is closed. LorakitError: settings, adapter or prompt.
        """
        settings = settings or SamplingSettings()
        chosen = self._adapter(adapter)
        prompts = self._model.codec(chosen)
        settings.check(prompts.num_tokens)
        prompts.check_answers()
        prompts.check_ids(prompt, settings.max_tokens)
        self._check_size(len(prompt), settings.max_tokens)
        grammar = prompts.grammars.compile(settings.response_format, min_tokens=settings.min_tokens)
        ends = frozenset((*prompts.end_ids, *settings.stop_token_ids, *prompts.special_ids(settings.stop)))
        generation = Generation(chosen, prompt, settings, ends, grammar, client=client, deliver=deliver)
        with self._changed:
            self._check_open()
            self._batch.waiting.add(generation)
        return generation

    def embed(
        self, inputs: Sequence[list[int]], pooling: Pooling, adapter: Chosen = None, client: str | None = None
    ) -> list[Future[Tensor]]:
        """Queue inputs, and return their pooled hidden states at once, as of ``EmbeddingInput``. Cancel frees one.

        inputs: that fit, as of `PromptCodec.text_ids` and `row_ids`. Raises as ``submit``.
        """
        chosen = self._adapter(adapter)
        rows = [EmbeddingInput(ids, chosen, pooling, client) for ids in inputs]
        with self._changed:
            self._check_open()
            self._embedder.waiting.add(*rows)
        return [row.vector for row in rows]

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def step_seconds(self) -> float:
        """Return the seconds since the step under way began; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def close(self) -> None:
        """End the thread. Generations that are not finished are cancelled."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def counts(self) -> Mapping[str, int]:
        return {**self._batch.counts(), "embedding": len(self._embedder)}

    def _adapter(self, adapter: Chosen) -> Adapter | None:
        return adapter if isinstance(adapter, Adapter) else self._model.adapter(adapter)

    def _check_open(self) -> None:
        if self._closed or not self.is_alive:
            raise TemporaryFailure("the engine is closed, or has ended after an error; restart the server")

    def _check_size(self, num_prompt: int, max_tokens: int) -> None:
        total = num_prompt + max_tokens
        limit = self._memory.longest
        need, room = (f"{tokens * self._memory.position_bytes:,} bytes" for tokens in (total, limit))
        wish = f"prompt: {num_prompt} tokens and max_tokens {max_tokens}"
        if total > self._steady_positions:
            why = "beyond, this base's rotary frequencies depend on the batch; `lorakit generate` answers longer ones"
            raise ContextLengthError(f"{wish} are more than {self._steady_positions}; {why}")
        if total > limit:
            has = f"the server has memory for {limit} tokens, {room} (--kv-memory, --kv-positions)"
            raise ContextLengthError(f"{wish} need keys and values of {total} tokens, {need}; {has}")

    def _loop(self) -> None:
        embeds_next = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._batch.is_busy or bool(self._embedder))
                if self._closed:
                    break
            self._step_began = time.monotonic()
            try:
                # prompts or inputs to embed, in turns, then one token of every decoding row
                embeds_next = bool(self._embedder) and not embeds_next
                if embeds_next:
                    self._embedder.step(PREFILL_TOKENS)
                self._batch.step(prefills=not embeds_next)
            except Exception as problem:  # outside of a request's own work: a bug, which must not stop all later ones
                self._batch.fail_all(problem)
            self._step_began = None
        self._batch.cancel_all()
        self._embedder.close()
