"""Compute many generations at once: each step is schedule, run, postprocess. Requests join and leave at every step.

Invariant: an answer depends on request, base and adapter alone. A row's keys are its own, its adapter is the one that
had the name when it came, and its tokens are drawn with its own generator.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Final, final

import torch
from torch import Tensor

from lorakit.errors import BaseModelError, LorakitError
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.lora.routing import Route
from lorakit.serving.generation import CANCELLED, LENGTH, STOP, Generation, Item, Row, Token
from lorakit.serving.kv_cache import SlotCache, size_class
from lorakit.serving.masks import attention_masks, check_layer_kinds
from lorakit.serving.sampling import Sampler, SamplingSettings

TOLERANCE: Final = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""relative, of logits computed in another order"""
PREFILL_TOKENS: Final = 512
"""tokens of prompts in one step, so that the rows that decode do not wait for a long prompt"""


@final
class ServingEngine:
    """One base with its adapters, and the rows that it decodes together.

    max_rows: rows of a batch. max_positions: slots x positions of keys and values, over all rows.
    """

    def __init__(self, model: AdaptedModel, *, max_rows: int = 16, max_positions: int = 1 << 16) -> None:
        self._model, self._max_rows, self._max_positions = model, max_rows, max_positions
        self._cache = SlotCache(model.model.config.get_text_config().num_hidden_layers)  # type: ignore[union-attr, operator]
        self._device = next(model.model.parameters()).device
        self._waiting: deque[Row] = deque()
        self._decoding: list[Row] = []
        self._prefilling: Row | None = None
        self._changed = threading.Condition()
        self.finished: Counter[str] = Counter()
        """reason -> generations that finished for it"""
        self._closed = False
        self._check()
        self._step_began: float | None = None
        self._thread = threading.Thread(target=self._run, name="lorakit engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: list[int],
        adapter: str | None = None,
        settings: SamplingSettings | None = None,
        deliver: Callable[[Item], None] | None = None,
    ) -> Generation:
        """Queue a request, and return its generation at once. ``deliver``: as of ``Generation``.

        Raises:
            LorakitError: settings out of range, an adapter that is not loaded, or a prompt that does not fit.
        """
        settings = settings or SamplingSettings()
        prompts = self._model.prompts
        settings.check(prompts.num_tokens)
        prompts.check_ids([prompt], settings.max_tokens)
        if size_class(len(prompt) + settings.max_tokens) > self._max_positions:
            raise LorakitError(
                f"prompt: {len(prompt)} tokens and max_tokens {settings.max_tokens} need"
                f" {size_class(len(prompt) + settings.max_tokens)} positions; the engine has {self._max_positions}"
            )
        generation = Generation(self._model.adapter(adapter), prompt, settings, deliver)
        ends = frozenset((*prompts.end_ids, *settings.stop_token_ids))
        row = Row(generation, Sampler(settings, prompt, ends), list(prompt), ends=ends)
        with self._changed:
            if self._closed:
                raise LorakitError("the engine is closed")
            self._waiting.append(row)
            self._changed.notify()
        return generation

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
        """Return the rows that decode, prefill and wait, and the bytes of keys and values."""
        return {
            "decoding": len(self._decoding), "prefilling": int(self._prefilling is not None),
            "waiting": len(self._waiting), "kv_bytes": self._cache.num_bytes(),
        }  # fmt: skip

    def _run(self) -> None:
        """Compute until the engine is closed, or until an error that is not of one request; then end all of them."""
        try:
            self._loop()
        finally:
            with self._changed:
                self._closed = True
            for row in [*self._rows(), *self._waiting]:
                self._finish(row, CANCELLED)

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not (self._closed or self._waiting or self._decoding or self._prefilling):
                    self._changed.wait()
                if self._closed:
                    break
            self._step_began = time.monotonic()
            self.step()
            self._step_began = None

    def _rows(self) -> list[Row]:
        return [*self._decoding, *([self._prefilling] if self._prefilling else [])]

    @torch.no_grad()
    def step(self) -> None:
        """Compute prompts up to a budget, then one token of every decoding row."""
        self._remove(lambda row: row.generation.is_cancelled, CANCELLED)
        budget = PREFILL_TOKENS
        while budget > 0 and (row := self._next_to_prefill()) is not None:
            budget -= self._prefill(row, budget)
        if self._decoding:
            self._decode()

    def _next_to_prefill(self) -> Row | None:
        """Return the row whose prompt is computed next: first come, first served; None if none fits."""
        if self._prefilling is None and self._waiting and self._fits(self._waiting[0]):
            with self._changed:
                self._prefilling = self._waiting.popleft()
        return self._prefilling

    def _fits(self, row: Row) -> bool:
        """True if the slots of all rows and of this one, at their longest, are within the engine's positions."""
        if len(self._decoding) >= self._max_rows:
            return False
        longest = max(len(one.generation.prompt) + one.generation.settings.max_tokens for one in [*self._decoding, row])
        return size_class(len(self._decoding) + 1) * size_class(longest) <= self._max_positions

    def _prefill(self, row: Row, budget: int) -> int:
        """Compute the next part of a row's prompt in the slot behind the decoding rows; return its tokens."""
        part, rest = row.pending[:budget], row.pending[budget:]
        try:
            logits = self._forward(len(self._decoding), [row], torch.tensor([part]))
        except Exception as problem:  # of this request alone: the others go on
            self._prefilling = None
            row.generation.fail(problem)
            return len(part)
        row.num_stored += len(part)
        row.pending = rest
        if not rest:
            self._prefilling = None
            self._decoding.append(row)
            self._draw(row, logits[0])
        return len(part)

    def _decode(self) -> None:
        rows = list(self._decoding)
        try:
            logits = self._forward(0, rows, torch.tensor([row.pending for row in rows]))
        except Exception as problem:
            self._decoding.clear()
            for row in rows:
                row.generation.fail(problem)
            return
        for row in rows:  # before the first one ends, because another row moves into its slot then
            row.num_stored += 1
        for row, row_logits in zip(rows, logits, strict=True):
            self._draw(row, row_logits)

    def _forward(self, first: int, rows: list[Row], ids: Tensor) -> Tensor:
        """Return the logits after the last token of each row, (rows, vocabulary) on the CPU. ids: (rows, tokens)."""
        starts = torch.tensor([row.num_stored for row in rows])
        self._cache.set_window(first, starts.to(self._device), ids.shape[1])
        route = Route(tuple(row.generation.adapter for row in rows))
        output = self._model.run(
            route,
            input_ids=ids.to(self._device),
            position_ids=(starts[:, None] + torch.arange(ids.shape[1])).to(self._device),
            attention_mask=attention_masks(self._model.model, starts, ids.shape[1], self._device),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1].float().cpu()
        return logits

    def _draw(self, row: Row, logits: Tensor) -> None:
        """Draw a row's next token, and end the row if it is the last one."""
        token, logprobs = row.sampler.draw(logits)
        settings = row.generation.settings
        if token in row.ends:
            self._end(row, STOP)
            return
        row.generation.put(Token(token, logprobs))
        row.pending = [token]
        row.num_generated += 1
        if row.num_generated >= settings.max_tokens:
            self._end(row, LENGTH)

    def _remove(self, test: Callable[[Row], bool], reason: str) -> None:
        for row in [row for row in self._rows() if test(row)]:
            self._end(row, reason)
        with self._changed:
            for row in [row for row in self._waiting if test(row)]:
                self._waiting.remove(row)
                self._finish(row, reason)

    def _end(self, row: Row, reason: str) -> None:
        """Free a row's slot: the last decoding row moves into it."""
        if row is self._prefilling:
            self._prefilling = None
        else:
            slot, last = self._decoding.index(row), len(self._decoding) - 1
            if slot != last:
                self._cache.move(last, slot, self._decoding[last].num_stored)
                self._decoding[slot] = self._decoding[last]
            self._decoding.pop()
            if self._prefilling is not None:  # its slot is the one behind the decoding rows
                self._cache.move(last + 1, last, self._prefilling.num_stored)
        self._finish(row, reason)

    def _finish(self, row: Row, reason: str) -> None:
        row.generation.finish(reason)
        self.finished[reason] += 1

    @torch.no_grad()
    def _check(self) -> None:
        """Compare the logits of a prompt in parts, beside another row, with those of a forward without cache.

        Raises:
            BaseModelError: they differ, so this base's attention does not work on slots.
        """
        check_layer_kinds(self._model.model)
        num_tokens = self._model.prompts.num_tokens
        long, short = ([(7 * index + size) % num_tokens for index in range(size)] for size in (9, 4))
        settings = SamplingSettings()
        rows = [Row(Generation(None, ids, settings), Sampler(settings, ids, frozenset()), ids) for ids in (long, short)]
        try:
            for slot, (row, ids) in enumerate(zip(rows, (long, short), strict=True)):
                for part in (ids[:3], ids[3:-1]):
                    if part:
                        self._forward(slot, [row], torch.tensor([part]))
                        row.num_stored += len(part)
            actual = self._forward(0, rows, torch.tensor([long[-1:], short[-1:]]))
            expected = torch.stack([self._logits_without_cache(ids) for ids in (long, short)])
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as problem:
            raise BaseModelError(f"base: {type(self._model.model).__name__} cannot be served: {problem}") from None
        difference = float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
        if not difference <= TOLERANCE.get(next(self._model.model.parameters()).dtype, 3e-2):  # so that NaN is refused
            raise BaseModelError(
                f"base: {type(self._model.model).__name__} cannot be served: its logits beside another row differ by"
                f" {difference:.1%} from those alone. `lorakit generate` answers with this base"
            )

    def _logits_without_cache(self, ids: list[int]) -> Tensor:
        output = self._model.run(Route((None,)), input_ids=torch.tensor([ids], device=self._device), use_cache=False)
        logits: Tensor = output.logits[0, -1].float().cpu()
        return logits
