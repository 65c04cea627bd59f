"""Decoding on a model of SmolLM2-135M's shape: one stream, eight, and with one, two and eight adapters (S11).

    python -m benchmarks.decode [--dtype float32] [--prepack 1] [--rounds 5] [--keep]

Random weights, rank 16, in the server's engine without HTTP. Beside it what reading all weights once takes.
"""

import statistics
import time
from contextlib import closing
from typing import Any, Final

import torch

from benchmarks.machine import program, scratch, table
from benchmarks.models import make_base, make_patch

NUCLEUS: Final = {"temperature": 0.7, "top_p": 0.9, "seed": 1}
PROMPT_TOKENS, NEW_TOKENS, RANK, ADAPTERS = 16, 64, 16, 8


def measure(dtype: str, prepack: int, rounds: int) -> dict[str, Any]:
    """Tokens per second of each kind of batch, in rounds of all kinds."""
    import lorakit
    from lorakit.decoding.sampling import SamplingSettings
    from lorakit.serving.engine import ServingEngine

    base = make_base(scratch(), "135M", torch.float32)
    patches = {f"a{seed}": make_patch(scratch(), base, rank=RANK, seed=seed) for seed in range(ADAPTERS)}
    model = lorakit.load(base, patches, dtype=dtype)
    if prepack:
        model.prepack(1 << 34)
    names: list[str | None] = [*patches]
    kinds: dict[str, tuple[list[str | None], dict[str, Any]]] = {
        "one stream": ([None], {}),
        "8 streams": ([None] * 8, {}),
        "8 streams, top_p": ([None] * 8, NUCLEUS),
        "one adapter x 8": ([names[0]] * 8, {}),
        "two adapters, 4 + 4": ([names[0]] * 4 + [names[1]] * 4, {}),
        "eight adapters": (names, {}),
    }
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    with closing(ServingEngine(model, max_rows=8)) as engine:
        for _ in range(rounds + 1):  # the first warms up
            for kind, (adapters, own) in kinds.items():
                settings = SamplingSettings(max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS, **own)
                prompts = torch.randint(5, 3000, (len(adapters), PROMPT_TOKENS)).tolist()
                began = time.perf_counter()
                pairs = zip(prompts, adapters, strict=True)
                answers = [engine.submit(prompt, adapter, settings) for prompt, adapter in pairs]
                num_tokens = sum(len(answer.ids()) for answer in answers)
                found[kind].append(num_tokens / (time.perf_counter() - began))
    for _ in range(2):  # the first starts this thread's own threads
        began = time.perf_counter()
        for parameter in model.model.parameters():
            parameter.sum()
    return {"dtype": dtype, "read_seconds": time.perf_counter() - began, "tokens_per_second": found}


def rates(result: dict[str, Any]) -> dict[str, float]:
    """Tokens per second, medians of the rounds after the first."""
    return {kind: statistics.median(speeds[1:]) for kind, speeds in result["tokens_per_second"].items()}


def show(result: dict[str, Any]) -> None:
    """The table."""
    lines: list[tuple[str, ...]] = [(f"SmolLM2-135M's shape, {result['dtype']}", "tokens per second")]
    lines += [(kind, f"{speed:.0f}") for kind, speed in rates(result).items()]
    table([*lines, ("reading all weights once", f"{1e3 * result['read_seconds']:.1f} ms")])


if __name__ == "__main__":
    program("decode-{dtype}", measure, show, dtype="float32", prepack=1, rounds=5)
