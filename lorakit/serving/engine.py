"""Compute many generations at once: each step is schedule, run, postprocess. Requests join and leave at every step.

Invariant: an answer depends on request, base and adapter alone. A row's keys are its own, its adapter is the one that
had the name when it came, and its tokens are drawn with its own generator. So a row may leave its slot when memory is
short, and be computed again later.
"""

import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, final

import torch
from torch import Tensor

from lorakit.base.positions import num_steady_positions
from lorakit.errors import LorakitError
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.serving.generation import CANCELLED, ERROR, LENGTH, STOP, Generation, Item, Row, Token
from lorakit.serving.grammar import GrammarCompiler
from lorakit.serving.kv_memory import KvMemory
from lorakit.serving.request_queue import RequestQueue
from lorakit.serving.sampling import Sampler, SamplingSettings
from lorakit.serving.slot_model import SlotModel

PREFILL_TOKENS: Final = 512
"""tokens of prompts in one step, so that the rows that decode do not wait for a long prompt"""
HEADROOM_TOKENS: Final = 64
"""that every row can still draw when another one joins, so that few are preempted"""


@final
class ServingEngine:
    """One base with its adapters, and the rows that it decodes together.

    max_rows: rows of a batch. kv_memory_bytes: of keys and values, of running rows and of common prefixes.
    max_positions: the same limit in tokens; the lower one holds. max_queue: requests that wait for their start.
    """

    def __init__(
        self,
        model: AdaptedModel,
        *,
        max_rows: int = 16,
        kv_memory_bytes: int = 1 << 30,
        max_positions: int | None = None,
        max_queue: int = 1024,
    ) -> None:
        self._model, self._max_rows = model, max_rows
        self._slots = SlotModel(model)
        self._steady_positions = num_steady_positions(model.model.config) or math.inf
        self._memory = KvMemory(self._slots.cache, kv_memory_bytes, max_positions)
        self._waiting = RequestQueue(max_queue)
        self._decoding: list[Row] = []
        self._prefilling: Row | None = None
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self.finished: Counter[str] = Counter()
        """reason -> generations that finished for it"""
        self.totals: Counter[str] = Counter(preemptions=0, failed_steps=0, prefix_queries=0, prefix_hits=0)
        """since the start: rows that were preempted, forwards that failed, tokens of prompts that were looked up in the
        prefix cache, and those that were read from it"""
        self._closed = False
        self._grammars = GrammarCompiler(model.tokenizer, model.prompts.num_tokens, model.prompts.end_ids)
        self._step_began: float | None = None
        self._thread = threading.Thread(target=self._loop, name="lorakit engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: list[int],
        adapter: str | None = None,
        settings: SamplingSettings | None = None,
        deliver: Callable[[Item], None] | None = None,
        client: str | None = None,
    ) -> Generation:
        """Queue a request, and return its generation at once. ``deliver``: as of ``Generation``.

        client: who sent it; clients whose requests wait take turns.

        Raises:
            QueueFullError: ``max_queue`` requests wait.
            LorakitError: settings out of range, an adapter that is not loaded, or a prompt that does not fit.
        """
        settings = settings or SamplingSettings()
        prompts = self._model.prompts
        settings.check(prompts.num_tokens)
        prompts.check_ids([prompt], settings.max_tokens)
        self._check_size(len(prompt), settings.max_tokens)
        grammar = self._grammars.compile(settings.response_format, min_tokens=settings.min_tokens)
        generation = Generation(self._model.adapter(adapter), prompt, settings, deliver)
        ends = frozenset((*prompts.end_ids, *settings.stop_token_ids))
        sampler = Sampler(settings, prompt, ends, grammar)
        with self._changed:
            if self._closed:
                raise LorakitError("the engine is closed")
            number = next(self._numbers)
            self._waiting.add(Row(generation, sampler, list(prompt), ends, number, client))
            self._changed.notify()
        return generation

    @property
    def max_positions(self) -> float:
        """Tokens of the longest prompt with its answer."""
        return min(self._model.prompts.limit, self._memory.max_positions, self._steady_positions)

    @property
    def is_alive(self) -> bool:
        """True while the engine's thread runs."""
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
        """Return the rows that decode, prefill and wait, and the bytes of keys and values.

        ``kv_bytes`` of the rows' slots and ``prefix_bytes`` of common prefixes are together at most ``kv_limit_bytes``.
        """
        with self._changed:
            waiting = len(self._waiting)
        kv_bytes, prefix_bytes = self._memory.num_bytes
        return {
            "decoding": len(self._decoding), "prefilling": int(self._prefilling is not None), "waiting": waiting,
            "kv_bytes": kv_bytes, "prefix_bytes": prefix_bytes,
            "kv_limit_bytes": self._memory.max_positions * self._memory.position_bytes,
        }  # fmt: skip

    def _check_size(self, num_prompt: int, max_tokens: int) -> None:
        total, limit = num_prompt + max_tokens, self._memory.max_positions
        if total > self._steady_positions:
            raise LorakitError(
                f"prompt: {num_prompt} tokens and max_tokens {max_tokens} are more than {self._steady_positions};"
                " beyond, this base's rotary frequencies depend on the longest row of a batch. Ask for fewer;"
                " `lorakit generate` answers longer ones"
            )
        if total > limit:
            need, room = (tokens * self._memory.position_bytes for tokens in (total, limit))
            raise LorakitError(
                f"prompt: {num_prompt} tokens and max_tokens {max_tokens} need keys and values of {total} tokens,"
                f" {need:,} bytes; the server has memory for {limit} tokens, {room:,} bytes. Ask for fewer, or start it"
                " with more (--kv-memory, --kv-positions)"
            )

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not (self._closed or self._waiting or self._rows()):
                    self._changed.wait()
                if self._closed:
                    break
            self._step_began = time.monotonic()
            try:
                self.step()
            except Exception as problem:  # outside of a request's own work: a bug, which must not stop all later ones
                self.totals["failed_steps"] += 1
                self._fail_all(problem)
            self._step_began = None
        for row in [*self._rows(), *self._waiting]:
            self._finish(row, CANCELLED)

    def _rows(self) -> list[Row]:
        return [*self._decoding, *([self._prefilling] if self._prefilling else [])]

    @torch.no_grad()
    def step(self) -> None:
        """Compute prompts up to a budget, then one token of every decoding row."""
        self._remove_cancelled()
        self._make_room()
        budget = PREFILL_TOKENS
        while budget > 0 and (row := self._next_to_prefill()) is not None:
            budget -= self._prefill(row, budget)
        self._make_room()  # a row whose prompt is computed has a token more
        if self._decoding:
            self._decode()

    def _remove_cancelled(self) -> None:
        for row in [row for row in self._rows() if row.generation.is_cancelled]:
            self._end(row, CANCELLED)
        with self._changed:
            waiting = [row for row in self._waiting if row.generation.is_cancelled]
            for row in waiting:
                self._waiting.remove(row)
        for row in waiting:
            self._finish(row, CANCELLED)

    def _make_room(self) -> None:
        """Preempt the youngest rows until the others' slots are within the memory."""
        while (rows := self._rows()) and not self._memory.fits(len(rows), _longest(rows)):
            row = max(rows, key=lambda row: row.number)
            self._vacate(row)
            row.num_stored = 0
            self.totals["preemptions"] += 1
            with self._changed:
                self._waiting.put_back(row)

    def _next_to_prefill(self) -> Row | None:
        """Return the row whose prompt is computed next; None if none waits, or the next one does not fit."""
        if self._prefilling is not None:
            return self._prefilling
        with self._changed:
            row = self._waiting.first()
            if row is None or row.generation.is_cancelled or not self._admits(row):
                return None  # a cancelled one is removed before the next step
            self._waiting.remove(row)
        self._prefilling = row
        return row

    def _admits(self, row: Row) -> bool:
        """True if a row has a slot, and it and all others have memory for their next tokens."""
        if not self._decoding:
            return True
        rows = [*self._decoding, row]
        longest = max(min(len(one.tokens) + HEADROOM_TOKENS, one.num_tokens_at_most) for one in rows)
        return len(rows) <= self._max_rows and self._memory.fits(len(rows), longest)

    def _prefill(self, row: Row, budget: int) -> int:
        """Compute the next part of a row's tokens in the slot behind the decoding rows; return its tokens."""
        slot, adapter = len(self._decoding), row.generation.adapter
        try:
            if row.num_stored == 0:
                self._memory.reserve(slot + 1, _longest(self._rows()))
                row.num_stored = self._memory.load_prefix(adapter, row.tokens, slot)
                self._count_prefix(row)
        except Exception as problem:  # of this request alone: the others go on
            self._fail(row, problem)
            return 0
        num_new = min(budget, len(row.pending))
        result = self._compute(slot, [row], num_new)[0]
        row.num_stored += num_new
        if isinstance(result, Exception):
            self._fail(row, result)
        elif not row.pending:
            self._prefilling = None
            self._decoding.append(row)
            self._memory.save_prefix(adapter, row.tokens, slot)
            self._draw(row, result)
        return num_new

    def _count_prefix(self, row: Row) -> None:
        if not row.is_started:
            row.is_started, row.generation.cached_tokens = True, row.num_stored
            self.totals["prefix_queries"] += len(row.tokens)
            self.totals["prefix_hits"] += row.num_stored

    def _decode(self) -> None:
        rows = list(self._decoding)
        results = self._compute(0, rows, 1)
        for row in rows:  # before the first one ends, because another row moves into its slot then
            row.num_stored += 1
        for row, result in zip(rows, results, strict=True):
            if isinstance(result, Exception):
                self._fail(row, result)
            else:
                self._draw(row, result)

    def _compute(self, first: int, rows: Sequence[Row], num_new: int) -> list[Tensor | Exception]:
        """Return the logits after each row's next tokens, or its error.

        If a batch fails, each of its rows is computed alone, so that only those fail that fail alone.
        """
        try:
            self._memory.reserve(len(self._rows()), _longest(self._rows()))
            logits = self._slots.forward(first, rows, num_new)
        except Exception as problem:
            self.totals["failed_steps"] += 1
            if len(rows) == 1:
                return [problem]
            return [one for slot, row in enumerate(rows, first) for one in self._compute(slot, [row], num_new)]
        return [ArithmeticError("the logits are not numbers") if row.sum().isnan() else row for row in logits]

    def _draw(self, row: Row, logits: Tensor) -> None:
        """Draw a row's next token, and end the row if it is the last one."""
        try:
            token, logprobs = row.sampler.draw(logits)
        except Exception as problem:  # of this request alone
            self._fail(row, problem)
            return
        if token in row.ends:
            row.generation.end = Token(token, logprobs)
            self._end(row, STOP)
            return
        row.generation.put(Token(token, logprobs))
        row.tokens.append(token)
        if len(row.tokens) >= row.num_tokens_at_most:
            self._end(row, LENGTH)

    def _end(self, row: Row, reason: str) -> None:
        self._vacate(row)
        self._finish(row, reason)

    def _finish(self, row: Row, reason: str) -> None:
        row.generation.finish(reason)
        self.finished[reason] += 1

    def _fail(self, row: Row, problem: Exception) -> None:
        self._vacate(row, is_sound=False)
        row.generation.fail(problem)
        self.finished[ERROR] += 1

    def _fail_all(self, problem: Exception) -> None:
        """Fail the running rows, or if there are none, those that wait."""
        with self._changed:
            rows = self._rows() or list(self._waiting)
            for row in [row for row in self._waiting if row in rows]:
                self._waiting.remove(row)
        self._decoding, self._prefilling = [], None
        self._memory.trim(0, 0)
        for row in rows:
            row.generation.fail(problem)
            self.finished[ERROR] += 1

    def _vacate(self, row: Row, *, is_sound: bool = True) -> None:
        """Free a row's slot: the last decoding row moves into it. If sound, its tokens are a prefix for later rows."""
        slot = self._rows().index(row)
        if is_sound:
            self._memory.save_prefix(row.generation.adapter, row.tokens[: row.num_stored], slot)
        else:
            self._slots.cache.erase(slot)
        if row is self._prefilling:
            self._prefilling = None
        else:
            last = len(self._decoding) - 1
            if slot != last:
                self._slots.cache.move(last, slot, self._decoding[last].num_stored)
                self._decoding[slot] = self._decoding[last]
            self._decoding.pop()
            if self._prefilling is not None:  # its slot is the one behind the decoding rows
                self._slots.cache.move(last + 1, last, self._prefilling.num_stored)
        rows = self._rows()
        self._memory.trim(len(rows), _longest(rows))


def _longest(rows: Sequence[Row]) -> int:
    return max((len(row.tokens) for row in rows), default=0)
