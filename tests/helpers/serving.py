"""Prompts for the serving engine, the answers that Python gives to them alone, and a hold on the engine's steps."""

import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch

from lorakit.decoding.generation import Item
from lorakit.decoding.sampling import SamplingSettings
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.serving.engine import ServingEngine


def prompts(number: int, longest: int = 30) -> list[list[int]]:
    chooser = random.Random(0)
    return [[chooser.randrange(5, 3000) for _ in range(chooser.randint(1, longest))] for _ in range(number)]


def alone(model: AdaptedModel, prompt: list[int], adapter: str | None, max_tokens: int) -> list[int]:
    """Return the greedy answer that transformers' own `generate` gives, for one row, with its cache."""
    ids = torch.tensor([prompt])
    with model.using(adapter), torch.no_grad():
        output = model.model.generate(  # type: ignore[operator]
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens,
            eos_token_id=model.prompts.end_ids or None, pad_token_id=0,
        )  # fmt: skip
    return model.prompts.until_end(output[0, len(prompt) :].tolist())


def wait_until(condition: Callable[[], object]) -> None:
    """Return when a condition is true. No deadline decides: the time limit of the test ends one that never is."""
    while not condition():
        time.sleep(0.001)


@final
class Forwards:
    """Holds the forwards of a model until the test allows them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_allowed: float = 0

    @property
    def num_allowed(self) -> float:
        """Forwards that may still begin."""
        return self._num_allowed

    def allow(self, number: float) -> None:
        """Let so many more forwards begin."""
        with self._changed:
            self._num_allowed += number
            self._changed.notify_all()

    def take(self, *_: Any) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._num_allowed >= 1)
            self._num_allowed -= 1


@contextmanager
def held_forwards(model: AdaptedModel) -> Iterator[Forwards]:
    """Hold the forwards of a model, also those without its head: an answer takes as long as the test needs."""
    forwards = Forwards()
    hook = model.model.base_model.register_forward_pre_hook(forwards.take)  # type: ignore[union-attr]
    try:
        yield forwards
    finally:
        forwards.allow(math.inf)
        hook.remove()


@contextmanager
def paused(engine: ServingEngine) -> Iterator[None]:
    """Let an idle engine wait until the block ends, so that it computes all requests of the block together."""
    held = threading.Event()
    go = threading.Event()

    def hold(item: Item) -> None:  # in the engine's thread
        held.set()
        go.wait()

    engine.submit([5], None, SamplingSettings(max_tokens=1), hold)
    held.wait()  # a row that is only admitted may still get company in its step
    try:
        yield
    finally:
        go.set()
