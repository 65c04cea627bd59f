"""Answers of very different lengths, beside transformers' `generate` and its own continuous batching (S2).

    python -m benchmarks.ragged [--shape 100M] [--pairs 5] [--keep]

32 requests of the base come at once; the lengths of their answers are exponential, 32 tokens on average. `generate`
answers them in batches of 8 as they came, each as long as its longest; tokens that nobody asked for do not count.
lorakit's engine computes 8 rows together, and once more 16, its default. Continuous batching computes all at once.
"""

import os
import random
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.machine import program, scratch, table
from benchmarks.models import make_base
from benchmarks.turns import Side, answers_of, middle, ratio, serve

REQUESTS, BATCH, PROMPT_TOKENS, MEAN_TOKENS, MOST_TOKENS = 32, 8, 32, 32, 160
EIGHT, DEFAULT, STATIC, CONTINUOUS = "lorakit, 8 rows", "lorakit, 16 rows", "generate", "continuous batching"
SIDES = (EIGHT, DEFAULT, STATIC, CONTINUOUS)
Requests = list[tuple[list[int], int]]
"""Prompt, and tokens of its answer."""
Answer = Callable[[Requests], list[list[int]]]


def requests_of(number: int) -> Requests:
    """The requests of a round; of the first one, which is not counted, a batch alone."""
    chooser = random.Random(number)
    lengths = [
        min(MOST_TOKENS, 1 + int(chooser.expovariate(1 / MEAN_TOKENS))) for _ in range(REQUESTS if number else BATCH)
    ]
    return [([chooser.randrange(5, 3000) for _ in range(PROMPT_TOKENS)], length) for length in lengths]


def engine_side(base: str, max_rows: int) -> Answer:
    """lorakit's engine, in process."""
    import lorakit
    from lorakit.decoding.sampling import SamplingSettings
    from lorakit.serving.engine import ServingEngine

    engine = ServingEngine(lorakit.load(base, dtype="float32"), max_rows=max_rows)

    def answer(requests: Requests) -> list[list[int]]:
        generations = [
            engine.submit(prompt, None, SamplingSettings(max_tokens=length, min_tokens=length))
            for prompt, length in requests
        ]
        return [generation.ids() for generation in generations]

    return answer


def static_side(base: str) -> Answer:
    """transformers' `generate`, batch after batch."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()

    @torch.no_grad()
    def answer(requests: Requests) -> list[list[int]]:
        answers: list[list[int]] = []
        for first in range(0, len(requests), BATCH):
            ids = torch.tensor([prompt for prompt, _ in requests[first : first + BATCH]])
            lengths = [length for _, length in requests[first : first + BATCH]]
            settings = GenerationConfig(max_new_tokens=max(lengths), min_new_tokens=max(lengths), pad_token_id=0)
            found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings).tolist()
            answers += [row[PROMPT_TOKENS:][:length] for row, length in zip(found, lengths, strict=True)]
        return answers

    return answer


def continuous_side(base: str) -> Answer:
    """transformers' continuous batching; of several sizes of its cache and batch, those that were fastest here."""
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(page_size=32, num_blocks=256, max_batch_tokens=64),
    )
    manager.start()

    def answer(requests: Requests) -> list[list[int]]:
        names = [manager.add_request(prompt, max_new_tokens=length) for prompt, length in requests]
        found: dict[str, list[int]] = {}
        while len(found) < len(names):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                found[result.request_id] = result.generated_tokens
            assert result is not None or manager.is_running()
        return [found[name] for name in names]

    return answer


def side(kind: str, base: str) -> None:
    """One side."""
    answer = {
        EIGHT: lambda: engine_side(base, 8), DEFAULT: lambda: engine_side(base, 16),
        STATIC: lambda: static_side(base), CONTINUOUS: lambda: continuous_side(base),
    }[kind]()  # fmt: skip
    number = 0

    def step() -> dict[str, Any]:
        nonlocal number
        requests = requests_of(number)
        number += 1
        began = time.perf_counter()
        answers = answer(requests)
        seconds = time.perf_counter() - began
        assert [len(one) for one in answers] == [length for _, length in requests]
        return {"seconds": seconds, "tokens": sum(map(len, answers)), "answers": answers}

    serve(step)
    os._exit(0)  # because the thread of transformers' continuous batching would keep the process


def measure(shape: str, pairs: int) -> dict[str, Any]:
    """All sides in turn."""
    base = make_base(scratch(), shape, torch.float32)
    sides = {kind: Side("benchmarks.ragged", kind, str(base)) for kind in SIDES}
    found = answers_of(sides, pairs)
    same: dict[str, float] = {kind: same_answers(found[kind], found[STATIC]) for kind in SIDES}
    for rounds in found.values():
        for step in rounds:
            del step["answers"]
    return {"shape": shape, "requests": REQUESTS, "batch": BATCH, "dtype": "float32", "same_answers": same, **found}


def same_answers(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float:
    """The share of tokens on which two sides agree; where two logits are nearly equal, the rest of a row is another."""
    pairs = [
        (a, b)
        for one, other in zip(ours, theirs, strict=True)
        for mine, yours in zip(one["answers"], other["answers"], strict=True)
        for a, b in zip(mine, yours, strict=True)
    ]
    return sum(int(a == b) for a, b in pairs) / len(pairs)


def rates(result: dict[str, Any]) -> dict[str, float]:
    """The figures that the targets speak of."""
    return {
        "ragged: tokens per second / generate": 1 / ratio(result[EIGHT], result[STATIC]),
        "ragged: tokens per second / continuous batching": 1 / ratio(result[DEFAULT], result[CONTINUOUS]),
        "continuous batching / generate": 1 / ratio(result[CONTINUOUS], result[STATIC]),
    }


def show(result: dict[str, Any]) -> None:
    """The table, and the check that all did the same work."""
    assert min(result["same_answers"].values()) > 0.9, f"not the same work: {result['same_answers']}"
    print(f"{result['shape']}, float32, {REQUESTS} requests of {PROMPT_TOKENS} tokens + {MEAN_TOKENS} on average\n")
    lines: list[tuple[str, ...]] = [("", "seconds", "tokens/s", "/ generate")]
    for kind in SIDES:
        rounds = result[kind]
        speed = middle(rounds, "tokens") / middle(rounds)
        lines.append((kind, f"{middle(rounds):.2f}", f"{speed:.1f}", f"{1 / ratio(rounds, result[STATIC]):.3f}"))
    table(lines)
    print()
    for name, rate in rates(result).items():
        print(f"{name:<48} {rate:.3f}")


if __name__ == "__main__":
    program("ragged-{shape}", measure, show, shape="100M", pairs=5)
