"""Prompts for the serving engine, and the answers that Python gives to them alone."""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

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
