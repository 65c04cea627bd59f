"""Requests of as many adapters as rows beside the same requests of the base, in lorakit's engine and in PEFT (S1).

    python -m benchmarks.mixed [--shape 1.1B] [--pairs 5] [--keep]

Both sides have a process of their own and take turns; a turn is the requests on the base and on the adapters. PEFT is
in its best form (SDPA, autocast_adapter_dtype=False): `generate` with `adapter_names`, and with its adapters off.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.machine import program, scratch, table
from benchmarks.models import make_base, make_patch
from benchmarks.turns import Side, answers_of, middle, ratio, serve

ROWS, RANK, PROMPT_TOKENS, NEW_TOKENS = 8, 16, 16, 16
Answer = Callable[[list[list[int]], list[str | None]], list[list[int]]]
"""Prompts and the adapter of each -> the new tokens of each."""


def lorakit_side(base: str, patches: dict[str, str]) -> Answer:
    """lorakit's engine, in process."""
    import lorakit
    from lorakit.decoding.sampling import SamplingSettings
    from lorakit.serving.engine import ServingEngine

    model = lorakit.load(base, patches, dtype="float32")
    engine = ServingEngine(model, max_rows=ROWS)
    settings = SamplingSettings(max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS)

    def answer(prompts: list[list[int]], adapters: list[str | None]) -> list[list[int]]:
        pairs = zip(prompts, adapters, strict=True)
        generations = [engine.submit(prompt, adapter, settings) for prompt, adapter in pairs]
        return [generation.ids() for generation in generations]

    return answer


def peft_side(base: str, patches: dict[str, str]) -> Answer:
    """PEFT's mixed batches."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    (first, folder), *others = patches.items()
    model = PeftModel.from_pretrained(model, folder, adapter_name=first, autocast_adapter_dtype=False)
    for name, folder in others:
        model.load_adapter(folder, adapter_name=name, autocast_adapter_dtype=False)
    model.eval()
    settings = GenerationConfig(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, pad_token_id=0)

    @torch.no_grad()
    def answer(prompts: list[list[int]], adapters: list[str | None]) -> list[list[int]]:
        ids = torch.tensor(prompts)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "generation_config": settings}
        if set(adapters) == {None}:
            with model.disable_adapter():
                answers = model.generate(**inputs)
        else:
            answers = model.generate(**inputs, adapter_names=[name or "__base__" for name in adapters])
        found: list[list[int]] = answers[:, ids.shape[1] :].tolist()
        return found

    return answer


def side(kind: str, base: str, *folders: str) -> None:
    """One side; a round is the same prompts on the base and on an adapter each, the order turning round."""
    patches = {f"a{number}": folder for number, folder in enumerate(folders)}
    answer = {"lorakit": lorakit_side, "peft": peft_side}[kind](base, patches)
    works: dict[str, list[str | None]] = {"base": [None] * ROWS, "mixed": [*patches]}
    number = 0

    def step() -> dict[str, Any]:
        nonlocal number
        prompts = torch.randint(5, 3000, (ROWS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(number))
        found: dict[str, Any] = {}
        for work in list(works) if number % 2 else reversed(works):
            began = time.perf_counter()
            answers = answer(prompts.tolist(), works[work])
            found[work] = time.perf_counter() - began
            assert all(len(one) == NEW_TOKENS for one in answers)
            found[f"{work} tokens"] = answers
        number += 1
        return found

    serve(step)


def measure(shape: str, pairs: int) -> dict[str, Any]:
    """Both sides in turn."""
    base = make_base(scratch(), shape, torch.float32)
    patches = [str(make_patch(scratch(), base, rank=RANK, seed=seed)) for seed in range(ROWS)]
    sides = {kind: Side("benchmarks.mixed", kind, str(base), *patches) for kind in ("lorakit", "peft")}
    found = answers_of(sides, pairs)
    facts = {"shape": shape, "rows": ROWS, "rank": RANK, "dtype": "float32", "new_tokens": NEW_TOKENS}
    return {**facts, "same_answers": same_answers(found), **found}


def same_answers(found: dict[str, list[dict[str, Any]]]) -> float:
    """The share of tokens on which both sides agree; where two logits are nearly equal, the rest of a row is another.

    The token lists, which nobody reads again, are taken out.
    """
    agree = 0
    for one, other in zip(found["lorakit"], found["peft"], strict=True):
        for work in ("base tokens", "mixed tokens"):
            agree += int((torch.tensor(one.pop(work)) == torch.tensor(other.pop(work))).sum())
    return agree / (2 * len(found["peft"]) * ROWS * NEW_TOKENS)


def rates(result: dict[str, Any]) -> dict[str, float]:
    """The figures that the targets speak of."""
    ours, theirs = result["lorakit"], result["peft"]
    return {
        "8 adapters: tokens per second / base": share(ours),
        "PEFT: 8 adapters / base": share(theirs),
        "8 adapters: tokens per second / PEFT": 1 / ratio(ours, theirs, "mixed"),
        "base: tokens per second / transformers": 1 / ratio(ours, theirs, "base"),
    }


def share(rounds: list[dict[str, Any]]) -> float:
    """Tokens per second on the adapters by those on the base, the median of the rounds."""
    return float(statistics.median(one["base"] / one["mixed"] for one in rounds))


def show(result: dict[str, Any]) -> None:
    """The table, and the check that both did the same work."""
    assert result["same_answers"] > 0.9, f"not the same work: {result['same_answers']:.0%} of the tokens are the same"
    print(f"{result['shape']}, float32, rank {RANK}, {ROWS} requests of {PROMPT_TOKENS} + {NEW_TOKENS} tokens\n")
    lines: list[tuple[str, ...]] = [("tokens per second", "base", f"{ROWS} adapters")]
    for kind in ("lorakit", "peft"):
        speeds = [ROWS * NEW_TOKENS / middle(result[kind], work) for work in ("base", "mixed")]
        lines.append((kind, *(f"{speed:.1f}" for speed in speeds)))
    table(lines)
    print()
    for name, rate in rates(result).items():
        print(f"{name:<42} {rate:.3f}")


if __name__ == "__main__":
    program("mixed-{shape}", measure, show, shape="1.1B", pairs=5)
