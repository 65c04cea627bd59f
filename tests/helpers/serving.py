"""Prompts for the serving engine, and the answers that Python gives to them alone."""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lorakit.inference.adapted_model import AdaptedModel
from lorakit.serving.engine import ServingEngine
from lorakit.serving.sampling import SamplingSettings


def prompts(number: int, longest: int = 30) -> list[list[int]]:
    chooser = random.Random(0)
    return [[chooser.randrange(5, 3000) for _ in range(chooser.randint(1, longest))] for _ in range(number)]


def alone(model: AdaptedModel, prompt: list[int], adapter: str | None, max_tokens: int) -> list[int]:
    return model.generate_ids([prompt], adapter, max_new_tokens=max_tokens)[0]


@contextmanager
def paused(engine: ServingEngine) -> Iterator[None]:
    """Let an idle engine wait until the block ends, so that it computes all requests of the block together."""
    go = threading.Event()
    engine.submit([5], None, SamplingSettings(max_tokens=1), lambda item: go.wait() and None)
    while engine.counts()["waiting"]:
        time.sleep(0.001)
    try:
        yield
    finally:
        go.set()
