"""A training step beside the frozen base's forward and backward, and beside PEFT (C1, C2, C3, C4).

    python -m benchmarks.step [--shape 100M] [--rows even | half | chat] [--pairs 7] [--keep]

Sides on the same rows: the frozen base alone, lorakit, PEFT in its best form (SDPA, autocast_adapter_dtype=False,
fused AdamW) and PEFT as it comes, both in a loop without Trainer's extras, padded to the longest row. The adapters
start from the same patch with B non-zero, and a result counts only when the loss of every step agrees.

`even`: four rows of 256 tokens, all learnt. `half`: the same, the second half learnt. `chat`: eight rows of mixed
lengths (log-normal), the second half of each learnt; and lorakit once more on as many tokens in rows of one length.
"""

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import facts, keep, matmul_rate, peak_bytes, scratch, table
from benchmarks.models import make_base, make_patch
from benchmarks.turns import Side, Step, middle, ratio, serve, take_turns

RANK, RATE = 16, 1e-4
SIDES = ("floor", "lorakit", "peft", "peft defaults")
EVEN = "lorakit, rows of one length"
AGREES = 1e-6


@dataclass(frozen=True)
class Row:
    """Token ids, and which of them are learnt."""

    ids: np.ndarray
    learnt: np.ndarray


class Rows(list[Row]):
    """Rows as lorakit's data gives them."""

    def ids(self, row: int) -> np.ndarray:
        return self[row].ids

    def learnt(self, row: int) -> np.ndarray:
        return self[row].learnt


def lengths_of(work: str, seed: int, *, even: bool = False) -> list[int]:
    """Tokens of each row of a step."""
    if work != "chat":
        return [256] * 4
    drawn = np.random.default_rng(seed).lognormal(math.log(96), 0.8, size=8)
    mixed = np.clip(drawn, 16, 512).astype(int).tolist()
    return [sum(mixed) // len(mixed)] * len(mixed) if even else mixed


def rows_of(base: Path, work: str, seed: int, *, even: bool = False) -> Rows:
    """Rows of random tokens; of `half` and `chat` the last half of each is learnt, as an answer is."""
    numbers = np.random.default_rng(seed + 1_000_000)
    vocabulary = json.loads((base / "config.json").read_text())["vocab_size"]
    from_ = 0.0 if work == "even" else 0.5
    return Rows(
        Row(numbers.integers(0, vocabulary, length), np.arange(length) >= round(length * from_))
        for length in lengths_of(work, seed, even=even)
    )


def lorakit_side(base: Path, patch: Path, work: str, *, even: bool = False) -> Step:
    """lorakit's own engine on packed rows."""
    from functools import partial

    import lorakit
    from lorakit.attention import attend_row_by_row
    from lorakit.data import collate
    from lorakit.engine import StepSettings, open_engine
    from lorakit.lora import adapter_tensors
    from lorakit.model import load_base
    from lorakit.optim import build_optimizer
    from lorakit.patch import read_patch
    from lorakit.recipe import ParallelSection

    engine = open_engine(ParallelSection())
    model = lorakit.inject(load_base(base, torch.float32, engine.device), rank=RANK, alpha=2.0 * RANK)
    stored = read_patch(patch)
    with torch.no_grad():
        for name, tensor in adapter_tensors(model).items():
            layer, _, key = name.rpartition(".")
            tensor.copy_(stored.layers[layer].tensors[key])
    build = partial(build_optimizer, betas=(0.9, 0.999), epsilon=1e-8, weight_decay=0.0)
    engine.prepare(model, build, StepSettings(0, 1.0, lambda step: RATE))
    engine.called.by_row = attend_row_by_row(model)
    number = 0

    def step() -> dict[str, Any]:
        nonlocal number
        rows = rows_of(base, work, number, even=even)
        batch = collate(rows, list(range(len(rows))), packing=True)  # type: ignore[arg-type]
        began = time.perf_counter()
        report = engine.step(number, [batch])
        number += 1
        return {"seconds": time.perf_counter() - began, "loss": report.loss, "tokens": batch.num_tokens}

    return step


def torch_side(base: Path, patch: Path | None, work: str, *, defaults: bool) -> Step:
    """transformers and PEFT in a loop of their own; without a patch the frozen base's forward and backward alone."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    optimizer: torch.optim.Optimizer | None = None
    if patch is None:
        model.requires_grad_(False)
        model.enable_input_require_grads()
    else:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, patch, is_trainable=True, autocast_adapter_dtype=defaults)
        learning = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(learning, lr=RATE, weight_decay=0.0, fused=not defaults)
    model.train()
    number = 0

    def step() -> dict[str, Any]:
        nonlocal number
        rows = rows_of(base, work, number)
        ids, labels, mask = (pad(parts, value) for parts, value in (
            ([row.ids for row in rows], 0),
            ([np.where(row.learnt, row.ids, -100) for row in rows], -100),
            ([np.ones_like(row.ids) for row in rows], 0),
        ))  # fmt: skip
        masks = {} if bool(mask.all()) else {"attention_mask": mask}
        number += 1
        began = time.perf_counter()
        loss = model(input_ids=ids, labels=labels, use_cache=False, **masks).loss
        loss.backward()
        if optimizer is not None:
            torch.nn.utils.clip_grad_norm_(learning, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "loss": float(loss.detach()), "tokens": int(mask.sum()), "padded": mask.numel()}

    return step


def pad(parts: list[np.ndarray], value: int) -> torch.Tensor:
    """Rows as lines of one length."""
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(part) for part in parts], True, value)


def side(name: str, base: Path, patch: Path, work: str) -> None:
    """One side, in this process."""
    import peft  # noqa: F401
    import transformers  # noqa: F401

    imports = peak_bytes()
    if name.startswith("lorakit"):
        step = lorakit_side(base, patch, work, even=name == EVEN)
    else:
        step = torch_side(base, None if name == "floor" else patch, work, defaults=name == "peft defaults")
    weights = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    serve(step, imports_bytes=imports, weights_bytes=weights)


def measure(shape: str, work: str, pairs: int) -> dict[str, Any]:
    """Every side in turn."""
    base = make_base(scratch(), shape, torch.float32)
    patch = make_patch(scratch(), base, rank=RANK, seed=0)
    paths = ("--base", str(base), "--patch", str(patch), "--rows", work)
    names = [*SIDES, *([EVEN] if work == "chat" else [])]
    sides = {name: Side("-m", "benchmarks.step", "--side", name, *paths) for name in names}
    found = take_turns(sides, pairs)
    for one in sides.values():
        one.end()
    return {
        "shape": shape, "rows": work, "rank": RANK, "dtype": "float32", "sides": names,
        "ready": {name: one.ready for name, one in sides.items()}, **found,
        "flops_of_a_token": flops(base, work), "matmul_flops": matmul_rate(base, 1024),
    }  # fmt: skip


def flops(base: Path, work: str) -> float:
    """Useful operations of a token: 4 P + 6 s h L + 6 P of the adapter; the head where something is learnt."""
    from lorakit.lora import AdapterSpec, find_targets
    from lorakit.model import load_skeleton

    config = json.loads((base / "config.json").read_text())
    targets = find_targets(load_skeleton(base), AdapterSpec(rank=RANK))
    products = sum(t.in_features * t.out_features for t in targets)
    head = config["vocab_size"] * config["hidden_size"] * (1.0 if work == "even" else 0.5)
    low_rank = sum(RANK * (t.in_features + t.out_features) for t in targets)
    rows = lengths_of(work, 0)
    seen = sum(length * length / 2 for length in rows) / sum(rows)
    return 4.0 * (products + head) + 6 * seen * config["hidden_size"] * config["num_hidden_layers"] + 6.0 * low_rank


def over_weights(result: dict[str, Any], name: str) -> int:
    """Peak memory of a side above its imports and the weights."""
    ready = result["ready"][name]
    peak: int = result[name][-1]["peak_bytes"]
    return peak - ready["imports_bytes"] - ready["weights_bytes"]


def rates(result: dict[str, Any]) -> dict[str, float]:
    """The figures that targets speak of."""
    ours, theirs = result["lorakit"], result["peft"]
    above = {name: over_weights(result, name) for name in result["sides"]}
    rate = middle(ours, "tokens") / middle(ours)
    found = {
        "lorakit / floor": ratio(ours, result["floor"]), "peft / floor": ratio(theirs, result["floor"]),
        "tokens per second / peft": 1 / ratio(ours, theirs),
        "tokens per second / peft defaults": 1 / ratio(ours, result["peft defaults"]),
        "memory / peft": above["lorakit"] / above["peft"],
        "of the matmul ceiling": rate * result["flops_of_a_token"] / result["matmul_flops"],
    }  # fmt: skip
    if EVEN in result:
        found["tokens per second / rows of one length"] = 1 / ratio(ours, result[EVEN])
    return found


def show(result: dict[str, Any]) -> None:
    """The table, and the check that all did the same work."""
    for name in ("peft", "peft defaults"):
        off = max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(result["lorakit"], result[name], strict=True))
        assert off < AGREES, f"{name}: not the same work, losses differ by {off:.1e}"
    padding = 1 - sum(one["tokens"] for one in result["peft"]) / sum(one["padded"] for one in result["peft"])
    print(
        f"{result['shape']}, rows: {result['rows']}, float32, rank {RANK} on all linear layers, {padding:.0%} padding\n"
    )
    lines: list[tuple[str, ...]] = [("", "seconds", "/ floor", "tokens/s", "MB over imports and weights")]
    for name in result["sides"]:
        rounds = result[name]
        lines.append((
            name, f"{middle(rounds):.3f}", f"{ratio(rounds, result['floor']):.3f}",
            f"{middle(rounds, 'tokens') / middle(rounds):.0f}", f"{over_weights(result, name) / 1e6:.0f}",
        ))  # fmt: skip
    table(lines)
    print()
    for name, rate in rates(result).items():
        print(f"{name:<42} {rate:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="100M")
    parser.add_argument("--rows", default="even", choices=("even", "half", "chat"))
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/")
    parser.add_argument("--side")
    parser.add_argument("--base", type=Path)
    parser.add_argument("--patch", type=Path)
    options = parser.parse_args()
    if options.side:
        side(options.side, options.base, options.patch, options.rows)
    else:
        print(facts()["hardware"])
        figures = measure(options.shape, options.rows, options.pairs)
        show(figures)
        if options.keep:
            keep(f"step-{options.shape}-{options.rows}", figures)
