"""Answer prompts in one continuous batch, each row with its own adapter and its own settings.

Invariant: an answer depends on its prompt, adapter and settings alone. A base whose attention does not work on slots
answers with transformers' own cache: rows of one length together, because padding would reach the state of some layers.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from lorakit.base.layers import num_steady_positions
from lorakit.base.transformers_io import generation_settings
from lorakit.decoding.batch import ContinuousBatch
from lorakit.decoding.generation import LENGTH, STOP, Generation
from lorakit.decoding.kv_memory import KvMemory
from lorakit.decoding.sampling import Token, draw_tokens
from lorakit.decoding.slot_model import RoutedModel
from lorakit.errors import LorakitError
from lorakit.files.progress import report_progress
from lorakit.lora.untrained import relative_difference, tolerance
from lorakit.slots.routing import Route, own_logits

MAX_ROWS: Final = 64  # of a batch; more rows wait until one of these has its answer


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
        own = own_logits([row.adapter for row in rows], scores.float().cpu())
        chosen = torch.full_like(scores, -math.inf)
        for row, item in enumerate(draw_tokens([row.sampler for row in rows], own)):
            if isinstance(item, Exception):
                raise LorakitError(str(item)) from item
            chosen[row, item.id] = 0.0
        if input_ids.shape == ids.shape and relative_difference(scores.float(), expected) > tolerance(expected):
            name = type(model.model).__name__
            raise LorakitError(f"base: transformers' generate gives {name} other logits than a forward of the prompt")
        return chosen

    max_tokens = rows[0].settings.max_tokens
    ends = rows[0].ends
    ids = torch.tensor([row.tokens for row in rows], device=next(model.model.parameters()).device)
    config = generation_settings(max_new_tokens=max_tokens, eos_token_id=sorted(ends) or None, pad_token_id=0)
    with model.routed(Route(tuple(row.adapter for row in rows))), torch.no_grad():
        expected = model.model(input_ids=ids, use_cache=False).logits[:, -1].float()
        output = model.model.generate(  # type: ignore[operator]
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config, logits_processor=[keep_drawn]
        )
    for row, tokens in zip(rows, output[:, ids.shape[1] :].tolist(), strict=True):
        answer = list(itertools.takewhile(lambda token: token not in ends, tokens))
        for token in answer:
            row.put(Token(token))
        row.finish(LENGTH if len(answer) == len(tokens) else STOP)
