"""Compute hidden states of inputs, such as their embeddings, a bounded number of tokens in a step.

Invariant: a vector depends on its input, base and adapter alone. Rows are padded on the right, where no token of a
causal model attends to. Where tokens see later ones, as those of an encoder do, a mask tells them, and an input is
computed in one step.
"""

import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, final

import torch
from torch import Tensor

from lorakit.decoding.generation import RequestQueue
from lorakit.decoding.slot_model import RoutedModel
from lorakit.lora.untrained import relative_difference, tolerance
from lorakit.ops.batch_invariance import BatchSizes
from lorakit.ops.encoder_head import LAST, MEAN, token_types
from lorakit.patch.pooling import Pooling
from lorakit.slots.routing import Adapter, Route

MAX_TOKENS: Final = 8192  # of a batch of `pooled_states`, padding included, unless a row is longer


@dataclass(eq=False)
class EmbeddingInput:
    """An input that waits for its vector."""

    ids: list[int]
    adapter: Adapter | None  # as it was when the input came, whatever is loaded since
    pooling: Pooling
    client: str | None = None
    number: int = 0
    vector: Future[Tensor] = field(default_factory=Future)  # of its pooled hidden states, (width,) float32 on the CPU


@final
class Embedder:
    """The inputs that wait, and the batch under way. changed: of their queue. max_waiting: how many it takes.

    takes_parts: of ``SlotModel``; False computes each input in one step.
    """

    def __init__(
        self,
        model: RoutedModel,
        changed: threading.Condition | None = None,
        max_waiting: int | None = None,
        *,
        takes_parts: bool = True,
    ) -> None:
        self._model = model
        self._takes_parts = takes_parts
        self._device = next(model.model.parameters()).device
        self._sizes = BatchSizes.of(model.model)
        self.waiting = RequestQueue[EmbeddingInput](max_waiting, changed)
        self._batch: list[EmbeddingInput] = []
        self._steps: Iterator[None] = iter(())

    @cached_property
    def _sees_later(self) -> bool:
        """True if the state of a token depends on the token after it."""
        states = self._states([[1, 0], [1, 2]])
        return relative_difference(states[1, 0], states[0, 0]) > tolerance(states)

    @cached_property
    def _sees_padding(self) -> bool:
        """True if the states of a row depend on its padding, in spite of a mask, such as ConvBERT's."""
        if not self._sees_later:
            return False
        padded = self._states([[1, 2, 0, 0]], [[1, 1, 0, 0]])
        return relative_difference(padded[:, :2], self._states([[1, 2]])) > tolerance(padded)

    def _states(self, ids: list[list[int]], mask: list[list[int]] | None = None) -> Tensor:
        masks = {} if mask is None else {"attention_mask": torch.tensor(mask, device=self._device)}
        route = Route((None,))
        with torch.no_grad():
            output = self._forward(route, torch.tensor(ids, device=self._device), use_cache=False, **masks)
        return output.last_hidden_state

    def _forward(self, route: Route, ids: Tensor, **inputs: Any) -> Any:
        with self._model.routed(route.of_pass(ids.shape[1])):
            return self._model.model.base_model(input_ids=ids, **inputs)  # type: ignore[operator]

    def __len__(self) -> int:
        return len(self.waiting) + len(self._batch)

    @torch.no_grad()
    def step(self, budget: int) -> None:
        """Compute so many tokens of the batch under way, or if there is none, of the next one."""
        if not self._batch:
            self._batch = self._take(budget)
            self._steps = self._compute(self._batch, budget) if self._batch else iter(())
        if next(self._steps, self) is self:
            self._batch = []

    def close(self) -> None:
        for one in [*self._batch, *self.waiting]:
            one.vector.cancel()

    def _take(self, budget: int) -> list[EmbeddingInput]:
        """Return the inputs whose padded rows are within the budget; one that is longer comes alone."""
        batch: list[EmbeddingInput] = []
        while (one := self.waiting.first()) is not None:
            longest = max(len(other.ids) for other in (*batch, one))
            is_unequal = bool(batch) and len(one.ids) != len(batch[0].ids)
            if batch and (longest * (len(batch) + 1) > budget or (is_unequal and self._sees_padding)):
                break
            self.waiting.remove(one)
            if not one.vector.cancelled():
                batch.append(one)
        return batch

    def _compute(self, inputs: list[EmbeddingInput], budget: int) -> Iterator[None]:
        """Compute the vectors of a batch; yields where a step ends. If it fails, each input is computed alone."""
        try:
            vectors = yield from self._pooled(inputs, budget)
        except Exception as problem:
            if len(inputs) > 1:
                for one in inputs:
                    yield from self._compute([one], budget)
            elif inputs[0].vector.set_running_or_notify_cancel():  # else its client left
                inputs[0].vector.set_exception(problem)
            return
        for one, vector in zip(inputs, vectors, strict=True):
            if one.vector.set_running_or_notify_cancel():
                one.vector.set_result(vector)

    def _pooled(self, inputs: Sequence[EmbeddingInput], budget: int) -> Generator[None, None, list[Tensor]]:
        """Return each input's pooled states. A long one is computed in parts, with keys and values of its own."""
        num_tokens = max(len(one.ids) for one in inputs)
        sees_later = self._sees_later
        longest = num_tokens if self._sees_padding else self._sizes.width(self._sizes.tokens(num_tokens))
        width = budget if num_tokens > budget and self._takes_parts and not sees_later else longest
        device = self._device
        ids = torch.tensor([one.ids + [0] * (longest - len(one.ids)) for one in inputs], device=device)
        lengths = torch.tensor([[len(one.ids)] for one in inputs], device=device)
        own = {"attention_mask": (torch.arange(longest, device=device) < lengths).long()} if sees_later else {}
        separators = [-1 if one.pooling.separator is None else one.pooling.separator for one in inputs]
        if max(separators) >= 0:
            own["token_type_ids"] = token_types(ids, torch.tensor(separators, device=device)[:, None])
        route = Route(tuple(one.adapter for one in inputs))
        cache = None
        pooled = [torch.zeros(()) for _ in inputs]
        for start in range(0, longest, width):
            if start and all(one.vector.cancelled() for one in inputs):
                break
            part = ids[:, start : start + width]
            output = self._forward(route, part, past_key_values=cache, use_cache=longest > width, **own)
            cache = output.get("past_key_values")
            states = output.last_hidden_state.float().cpu()
            for row, one in enumerate(inputs):
                of_row = states[row, : max(0, len(one.ids) - start)]
                mode = one.pooling.mode
                if mode == MEAN:
                    pooled[row] = pooled[row] + of_row.sum(0) / len(one.ids)
                elif mode == LAST or not start:
                    pooled[row] = of_row[-1 if mode == LAST else 0]
            if start + width < longest:
                yield
        if not all(vector.isfinite().all() for vector in pooled):
            raise ArithmeticError("the embedding is not finite")
        return pooled


def pooled_states(
    model: RoutedModel, rows: Sequence[list[int]], adapters: Sequence[Adapter | None], poolings: Sequence[Pooling]
) -> list[Tensor]:
    """Return the pooled hidden states of each row, (width,) in float32 on the CPU."""
    inputs = list(map(EmbeddingInput, rows, adapters, poolings))
    embedder = Embedder(model)
    embedder.waiting.add(*sorted(inputs, key=lambda one: len(one.ids)))  # so that little is padded
    budget = max([MAX_TOKENS, *map(len, rows)])  # each row in one step
    while len(embedder):
        embedder.step(budget)
    return [one.vector.result() for one in inputs]
