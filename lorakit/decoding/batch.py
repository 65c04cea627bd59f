"""Rows that one base decodes together: each step is schedule, run, postprocess. Rows join and leave at every step.

Invariant: an answer depends on request, base and adapter alone. A row's keys are its own, its adapter is the one that
had the name when it came, and its tokens are drawn with its own generator. So a row may leave its slot when memory is
short, and be computed again later. A base whose attention does not work on slots answers with transformers' own cache:
rows of one length together, because padding would reach the state of some layers.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, final

import torch
from torch import Tensor

from lorakit.base.layers import num_steady_positions
from lorakit.base.transformers_io import generation_settings
from lorakit.decoding.generation import CANCELLED, ERROR, LENGTH, STOP, Generation, RequestQueue
from lorakit.decoding.kv_memory import KvMemory
from lorakit.decoding.sampling import Token, draw_tokens
from lorakit.decoding.slot_model import RoutedModel, SlotModel
from lorakit.errors import LorakitError
from lorakit.files.progress import report_progress
from lorakit.lora.untrained import relative_difference, tolerance
from lorakit.slots.routing import Route, own_logits

PREFILL_TOKENS: Final = 512  # tokens of prompts in one step, so that the rows that decode do not wait for a long prompt
HEADROOM_TOKENS: Final = 64  # that every row can still draw when another one joins, so that few are preempted
MAX_PADDING: Final = 64  # tokens of padding in a forward of several prompts; a forward of its own costs about as much
MAX_ROWS: Final = 64  # of `answer_all`; more rows wait until one of these has its answer


@final
class ContinuousBatch:
    """The rows in a model's slots, and those that wait. One thread calls ``step``; others may add to ``waiting``."""

    def __init__(self, slots: SlotModel, memory: KvMemory, max_rows: int, max_waiting: int | None = None) -> None:
        self.waiting = RequestQueue[Generation](max_waiting)
        self._slots = slots
        self._memory = memory
        self._max_rows = max_rows
        self._max_padding = 0 if slots.cache.has_states else MAX_PADDING
        self._decoding: list[Generation] = []
        self._prefilling: list[Generation] = []
        self.finished: Counter[str] = Counter()  # reason -> generations that finished for it
        self.totals: Counter[str] = Counter(preemptions=0, failed_steps=0)  # since the start: rows, forwards

    @property
    def is_busy(self) -> bool:
        return bool(self._rows() or self.waiting)

    def counts(self) -> Mapping[str, int]:
        """Return rows by state, and bytes: those of slots and of prefixes are together at most ``kv_limit_bytes``."""
        kv_bytes, prefix_bytes = self._memory.num_bytes
        return {
            "decoding": len(self._decoding), "prefilling": len(self._prefilling),
            "waiting": len(self.waiting), "kv_bytes": kv_bytes, "prefix_bytes": prefix_bytes,
            "kv_limit_bytes": self._memory.max_positions * self._memory.position_bytes,
        }  # fmt: skip

    def cancel_all(self) -> None:
        for row in [*self._rows(), *self.waiting]:
            self._finish(row, CANCELLED)

    @torch.no_grad()
    def step(self, *, prefills: bool = True) -> None:
        """Compute prompts up to a budget, unless another step ``prefills``, then one token of every decoding row."""
        self._remove_cancelled()
        self._make_room()
        budget = PREFILL_TOKENS if prefills else 0
        while budget > 0:
            self._admit(budget)
            if not self._prefilling:
                break
            budget -= max(self._prefill(budget), PREFILL_TOKENS // 8)  # a forward of few tokens takes about as long
        self._make_room()  # a row whose prompt is computed has a token more
        if self._decoding:
            rows = list(self._decoding)
            self._draw(rows, self._compute(rows, 1))

    def fail_all(self, problem: Exception) -> None:
        """Fail the running rows, or if there are none, those that wait."""
        self.totals["failed_steps"] += 1
        rows = self._rows() or list(self.waiting)
        for row in () if self._rows() else rows:
            self.waiting.remove(row)
        self._decoding = []
        self._prefilling = []
        self._slots.forget()
        for row in rows:
            self._slots.cache.free(row)
            self._finish(row, ERROR, problem)
        self._memory.trim([])

    def _rows(self) -> list[Generation]:
        return [*self._decoding, *self._prefilling]

    def _remove_cancelled(self) -> None:
        for row in [row for row in self._rows() if row.is_cancelled]:
            self._end(row, CANCELLED)
        for row in [row for row in self.waiting if row.is_cancelled]:
            self.waiting.remove(row)
            self._finish(row, CANCELLED)

    def _make_room(self) -> None:
        """Preempt rows until the others fit: those that are computed again soonest, but never the oldest."""
        while (rows := self._rows()) and not self._memory.fits([len(row.tokens) for row in rows]):
            oldest = min(rows, key=lambda row: row.number)
            row = min((row for row in rows if row is not oldest), key=lambda row: (row.num_stored, -row.number))
            self._free_slot(row)
            row.num_stored = 0
            self.totals["preemptions"] += 1
            self.waiting.put_back(row)

    def _admit(self, budget: int) -> None:
        """Give slots to rows that wait, as many as a forward of ``budget`` tokens computes."""
        while _num_padded(self._prefilling) < budget and (row := self.waiting.first()) is not None:
            if row.is_cancelled or not self._fits(row):
                return
            missing = self._memory.missing_blocks(row)
            if any(not one.planned.isdisjoint(missing[:1]) for one in self._prefilling):
                return  # its prefix is about to be computed, and it reads that then
            row.planned = frozenset(missing)
            self.waiting.remove(row)
            self._prefilling.append(row)
            try:
                self._memory.reserve(self._rows())
                row.num_stored = self._memory.load_prefix(row)
                if row.cached_tokens is None:
                    row.cached_tokens = row.num_stored
            except Exception as problem:  # of this request alone: the others go on
                self._end(row, ERROR, problem)

    def _fits(self, row: Generation) -> bool:
        """True if a row has a slot, and it and all others have memory for their next tokens."""
        rows = [*self._rows(), row]
        lengths = [min(len(one.tokens) + HEADROOM_TOKENS, one.num_tokens_at_most) for one in rows]
        return len(rows) == 1 or (len(rows) <= self._max_rows and self._memory.fits(lengths))

    def _prefill(self, budget: int) -> int:
        """Compute the prompts of the first rows that go together, or a part of one; return the tokens computed."""
        rows = self._prefilling[:1]
        for row in self._prefilling[1:]:
            both = [*rows, row]
            num_padded = _num_padded(both)
            if num_padded > budget or num_padded - sum(one.num_pending for one in both) > self._max_padding:
                break
            rows = both
        num_padded = _num_padded(rows)
        if not self._slots.takes_parts:
            budget = max(budget, num_padded)
        results = self._compute(rows, budget)
        if num_padded > budget:  # a part of one
            if isinstance(results[0], Exception):
                self._end(rows[0], ERROR, results[0])
            return budget
        self._decoding += rows
        del self._prefilling[: len(rows)]
        for row, result in zip(rows, results, strict=True):
            if not isinstance(result, Exception):
                self._memory.save_prefix(row)
        self._draw(rows, results)
        return num_padded

    def _compute(self, rows: Sequence[Generation], num_new: int) -> list[Tensor | Exception]:
        """Store each row's next tokens; return the logits after them, or its error. A failed batch goes row by row."""
        try:
            self._memory.reserve(self._rows())
            logits = self._slots.forward(rows, num_new)
        except Exception as problem:
            self.totals["failed_steps"] += 1
            if len(rows) == 1:
                return [problem]
            return [one for row in rows for one in self._compute([row], num_new)]
        for row in rows:
            row.num_stored += min(num_new, row.num_pending)
        return own_logits([row.adapter for row in rows], logits)

    def _draw(self, rows: Sequence[Generation], results: Sequence[Tensor | Exception]) -> None:
        """Draw the next token of each row from its logits; end the rows that are done, and those with an error."""
        items = draw_tokens([row.sampler for row in rows], results)
        for row, item in zip(rows, items, strict=True):
            if isinstance(item, Exception):
                self._end(row, ERROR, item)
            elif item.id in row.ends:
                row.end = item
                self._end(row, STOP)
            else:
                row.put(item)
                row.tokens.append(item.id)
                if len(row.tokens) >= row.num_tokens_at_most:
                    self._end(row, LENGTH)

    def _end(self, row: Generation, reason: str, problem: Exception | None = None) -> None:
        self._free_slot(row, keep_prefix=problem is None)
        self._finish(row, reason, problem)

    def _finish(self, row: Generation, reason: str, problem: Exception | None = None) -> None:
        row.finish(reason, problem)
        self.finished[reason] += 1

    def _free_slot(self, row: Generation, *, keep_prefix: bool = True) -> None:
        """Free a row's slot. ``keep_prefix``: its tokens are one for later rows."""
        self._slots.forget()
        if keep_prefix:
            self._memory.save_prefix(row)
        else:
            self._slots.cache.erase(row)
        self._slots.cache.free(row)
        (self._prefilling if row in self._prefilling else self._decoding).remove(row)
        self._memory.trim(self._rows())


def answer_all(model: RoutedModel, rows: Sequence[Generation]) -> None:
    """Compute the tokens of every row. Raises LorakitError: one cannot be computed."""
    slots = model.slots
    limit = 0 if slots is None else num_steady_positions(model.model.config) or math.inf
    in_slots = [row for row in rows if row.num_tokens_at_most <= limit]
    if slots is not None and in_slots:
        slots = slots.with_own_slots()
        # memory for the largest batch, so that no row leaves its slot before it has its answer
        longest = max(row.num_tokens_at_most for row in in_slots)
        memory = KvMemory.for_rows(slots.cache, min(MAX_ROWS, len(in_slots)), longest)
        batch = ContinuousBatch(slots, memory, MAX_ROWS)
        batch.waiting.add(*in_slots)
        while batch.is_busy:
            batch.step()
            report_progress()
    others = sorted((row for row in rows if row.num_tokens_at_most > limit), key=_lengths)
    for _, alike in itertools.groupby(others, key=_lengths):
        while part := list(itertools.islice(alike, MAX_ROWS)):
            _answer_with_generate(model, part)


def _lengths(row: Generation) -> tuple[int, int, list[int]]:
    """Return what rows that go together have in common: tokens, tokens at most, and end tokens."""
    return len(row.tokens), row.num_tokens_at_most, sorted(row.ends)


def _answer_with_generate(model: RoutedModel, rows: Sequence[Generation]) -> None:
    """Answer rows of one length and with the same end tokens with transformers' `generate`."""

    def keep_drawn(input_ids: Tensor, scores: Tensor) -> Tensor:
        """Leave the token alone that each row's own sampler draws, as transformers calls a processor of logits."""
        report_progress()
        own = own_logits([row.adapter for row in rows], scores.float())
        chosen = torch.full_like(scores, -math.inf)
        for row, item in enumerate(draw_tokens([row.sampler for row in rows], own)):
            if isinstance(item, Exception):
                raise LorakitError(str(item)) from item
            chosen[row, item.id] = 0.0
        if input_ids.shape == ids.shape and _is_apart(scores, expected):
            name = type(model.model).__name__
            raise LorakitError(f"base: transformers' generate gives {name} other logits than a forward of the prompt")
        return chosen

    max_tokens = rows[0].settings.max_tokens
    ends = rows[0].ends
    ids = torch.tensor([row.tokens for row in rows], device=next(model.model.parameters()).device)
    config = generation_settings(max_new_tokens=max_tokens, eos_token_id=sorted(ends) or None, pad_token_id=0)
    with model.routed(Route(tuple(row.adapter for row in rows))), torch.no_grad():
        expected = model.model(input_ids=ids, use_cache=False).logits[:, -1]
        output = model.model.generate(  # type: ignore[operator]
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config, logits_processor=[keep_drawn]
        )
    for row, tokens in zip(rows, output[:, ids.shape[1] :].tolist(), strict=True):
        answer = list(itertools.takewhile(lambda token: token not in ends, tokens))
        for token in answer:
            row.put(Token(token))
        row.finish(LENGTH if len(answer) == len(tokens) else STOP)


def _is_apart(actual: Tensor, expected: Tensor) -> bool:
    """True if logits differ by more than the rounding of their dtype, without new tokens of other rows' adapters."""
    is_known = expected.isfinite()
    numbers = (part.float().where(is_known, 0.0) for part in (actual, expected))
    return relative_difference(*numbers) > tolerance(expected)


def _num_padded(rows: Sequence[Generation]) -> int:
    return len(rows) * max((row.num_pending for row in rows), default=0)
