"""The serving engine: requests together beside one at a time, and the first token after a common prefix (S4).

    python -m benchmarks.serving [--shape 1.1B] [--pairs 7] [--keep]

Both sides of a pair run in this process, on the same base and adapters, one after the other.
"""

import random
import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import torch

from benchmarks.machine import program, scratch, table
from benchmarks.models import make_base, make_patch

ROWS, ADAPTERS, RANK, PROMPT_TOKENS, NEW_TOKENS = 8, 4, 16, 32, 32
PREFIX_TOKENS, OWN_TOKENS = 512, 16


def measure(shape: str, pairs: int) -> dict[str, Any]:
    """Each pair: seconds and tokens of all requests, and seconds to a first token."""
    import lorakit
    from lorakit.serving.engine import ServingEngine

    base = make_base(scratch(), shape, torch.float32)
    patches = {f"a{seed}": make_patch(scratch(), base, rank=RANK, seed=seed) for seed in range(ADAPTERS)}
    model = lorakit.load(base, patches, dtype="float32")
    found: dict[str, Any] = {"shape": shape, "rows": ROWS, "adapters": ADAPTERS, "rank": RANK, "dtype": "float32"}
    found |= {"together": [], "alone": [], "cold": [], "warm": [], "bare": []}
    ids = numbers(model.prompts.num_tokens)
    with closing(ServingEngine(model, max_rows=ROWS)) as engine:
        for _ in range(pairs + 1):  # the first warms up
            requests = [([next(ids) for _ in range(PROMPT_TOKENS)], f"a{row % ADAPTERS}") for row in range(ROWS)]
            found["together"].append(together(engine, requests))
            found["alone"].append(alone(model, requests))
            prefix = [next(ids) for _ in range(PREFIX_TOKENS)]
            for kind in ("cold", "warm"):
                found[kind].append(first_token(engine, [*prefix, *(next(ids) for _ in range(OWN_TOKENS))]))
            found["bare"].append(bare_forward(model, [next(ids) for _ in range(OWN_TOKENS)]))
        found["totals"] = dict(engine.totals)
    return found


def numbers(num_tokens: int) -> Iterator[int]:
    """Random token ids."""
    chooser = random.Random(0)
    while True:
        yield chooser.randrange(5, num_tokens)


def together(engine: Any, requests: list[tuple[list[int], str]]) -> dict[str, float]:
    """The requests, all submitted at once."""
    from lorakit.decoding.sampling import SamplingSettings

    settings = SamplingSettings(max_tokens=NEW_TOKENS)
    began = time.perf_counter()
    generations = [engine.submit(prompt, adapter, settings) for prompt, adapter in requests]
    tokens = sum(len(generation.ids()) for generation in generations)
    return {"seconds": time.perf_counter() - began, "tokens": tokens}


def alone(model: Any, requests: list[tuple[list[int], str]]) -> dict[str, float]:
    """The requests, one after the other through `AdaptedModel.generate_ids`."""
    began = time.perf_counter()
    tokens = sum(len(model.generate_ids([one], adapter, max_new_tokens=NEW_TOKENS)[0]) for one, adapter in requests)
    return {"seconds": time.perf_counter() - began, "tokens": tokens}


def first_token(engine: Any, prompt: list[int]) -> dict[str, float]:
    """One request: seconds to its first token, and the tokens that were in the prefix cache."""
    from lorakit.decoding.sampling import SamplingSettings

    began = time.perf_counter()
    generation = engine.submit(prompt, "a0", SamplingSettings(max_tokens=2, min_tokens=2))
    next(iter(generation))
    seconds = time.perf_counter() - began
    generation.ids()
    return {"seconds": seconds, "cached_tokens": generation.cached_tokens}


def bare_forward(model: Any, tokens: list[int]) -> dict[str, float]:
    """The model's own forward of the tokens that are in no cache: what a first token after a prefix takes at least."""
    from lorakit.ops.openmp import end_openmp_threads

    with torch.no_grad():
        model(torch.tensor([tokens]), adapters="a0")  # starts the threads of this one
        began = time.perf_counter()
        model(torch.tensor([tokens]), adapters="a0")
        seconds = time.perf_counter() - began
    end_openmp_threads()  # of this thread, beside the engine's
    return {"seconds": seconds}


def rates(result: dict[str, Any]) -> dict[str, float]:
    """The figures that the targets speak of."""
    return {
        "first token, 512 tokens cached / cold": ratio(result, "warm", "cold"),
        "first token, 512 tokens cached / forward of the other 16": ratio(result, "warm", "bare"),
        "8 requests: tokens per second / one at a time": ratio(result, "alone", "together"),
    }


def show(result: dict[str, Any]) -> None:
    """The table: medians of the pairs after the first."""
    for one, other in zip(result["together"], result["alone"], strict=True):
        assert one["tokens"] == other["tokens"], f"not the same work: {one}, {other}"
    rate = {
        kind: statistics.median(one["tokens"] / one["seconds"] for one in result[kind][1:])
        for kind in ("together", "alone")
    }
    first = {kind: statistics.median(one["seconds"] for one in result[kind][1:]) for kind in ("cold", "warm", "bare")}
    own = f"{PREFIX_TOKENS} + {OWN_TOKENS} tokens"
    many = f"{ROWS} requests, {ADAPTERS} adapters"
    table([
        (f"{result['shape']}, float32", "", "", "ratio"),
        ("tokens per second", "together", "one at a time", ""),
        (many, f"{rate['together']:.1f}", f"{rate['alone']:.1f}", f"{ratio(result, 'alone', 'together'):.2f}"),
        ("first token, ms", "prefix cached", "not cached", ""),
        (own, f"{first['warm'] * 1e3:.1f}", f"{first['cold'] * 1e3:.1f}", f"{ratio(result, 'warm', 'cold'):.3f}"),
        ("forward of the last 16", f"{first['bare'] * 1e3:.1f}", "", f"{ratio(result, 'bare', 'cold'):.3f}"),
    ])  # fmt: skip


def ratio(result: dict[str, Any], one: str, other: str) -> float:
    """The median over the pairs of the seconds of one side by those of the other."""
    pairs = zip(result[one][1:], result[other][1:], strict=True)
    return float(statistics.median(a["seconds"] / b["seconds"] for a, b in pairs))


if __name__ == "__main__":
    program("serving-{shape}", measure, show, shape="100M", pairs=7)
