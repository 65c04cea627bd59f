"""A training step beside the frozen base's forward and backward, and beside PEFT (C1, C2, C3, C4).

    python -m benchmarks.step [--shape 100M] [--rows even | half | chat] [--pairs 7] [--keep]

Sides on the same rows: the frozen base alone, lorakit, PEFT in its best form (SDPA, autocast_adapter_dtype=False,
fused AdamW) and PEFT as it comes, both in a loop without Trainer's extras, padded to the longest row. The adapters
start from the same patch with B non-zero, and a result counts only when the loss of every step agrees.

`even`: four rows of 256 tokens, all label tokens. `half`: the same, labels on the second half. `chat`: eight rows of
mixed lengths (log-normal), labels on the second half of each; and lorakit once more on as many tokens in rows of one
length.
"""

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from benchmarks.machine import CPU, copy_rate, matmul_rate, peak_bytes, program, scratch, table
from benchmarks.models import flops, make_base, make_patch
from benchmarks.rows import Rows, packed, padded, random_rows
from benchmarks.sides import RANK, adamw, frozen, lorakit_engine, patch_tensors, torch_step
from benchmarks.turns import BEFORE, Side, Step, answers_of, middle, ratio, serve
from lorakit.base.transformers_io import load_base, load_skeleton
from lorakit.launch.libraries import limit_kernel_caches

SIDES = ("floor", "lorakit", "peft", "peft defaults")
EVEN = "lorakit, rows of one length"
AGREES = 1e-6


def lengths_of(work: str, seed: int, *, even: bool = False) -> list[int]:
    """Tokens of each row of a step."""
    if work != "chat":
        return [256] * 4
    drawn = np.random.default_rng(seed).lognormal(math.log(96), 0.8, size=8)
    mixed = np.clip(drawn, 16, 512).astype(int).tolist()
    return [sum(mixed) // len(mixed)] * len(mixed) if even else mixed


def rows_of(base: Path, work: str, seed: int, *, even: bool = False) -> Rows:
    """Rows of random tokens; of `half` and `chat` the last half of each has labels, like an answer."""
    vocabulary = json.loads((base / "config.json").read_text())["vocab_size"]
    lengths = lengths_of(work, seed, even=even)
    return random_rows(vocabulary, lengths, seed + 1_000_000, 0.0 if work == "even" else 0.5)


def lorakit_side(base: Path, patch: Path, work: str, *, even: bool = False) -> Step:
    """lorakit's own engine on packed rows."""
    limit_kernel_caches("float32")
    adapter = patch_tensors(patch)
    engine = lorakit_engine(load_base(base, torch.float32, CPU), adapter, CPU)
    number = 0

    def step() -> dict[str, Any]:
        nonlocal number
        rows = rows_of(base, work, number, even=even)
        batch = packed(rows)
        began = time.perf_counter()
        report = engine.step(number, [batch])
        number += 1
        return {"seconds": time.perf_counter() - began, "loss": report.loss, "tokens": batch.num_tokens}

    return step


def torch_side(base: Path, patch: Path | None, work: str, *, defaults: bool) -> Step:
    """transformers and PEFT in a loop of their own; without a patch the frozen base's forward and backward alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    optimizer = None
    if patch is None:
        frozen(model)
    else:
        model = PeftModel.from_pretrained(model, patch, is_trainable=True, autocast_adapter_dtype=defaults)
        optimizer = adamw(model, fused=not defaults)
    model.train()
    number = 0

    def step() -> dict[str, Any]:
        nonlocal number
        rows = rows_of(base, work, number)
        inputs = padded(rows, CPU)
        number += 1
        began = time.perf_counter()
        loss, _ = torch_step(model, optimizer, [inputs])
        seconds = time.perf_counter() - began
        tokens = sum(len(row.ids) for row in rows)
        return {"seconds": seconds, "loss": float(loss), "tokens": tokens, "padded": inputs["input_ids"].numel()}

    return step


def side(name: str, base: str, patch: str, work: str) -> None:
    """One side, in this process; what any side needs is imported by now."""
    imports = peak_bytes()
    if name.startswith("lorakit"):
        step = lorakit_side(Path(base), Path(patch), work, even=name == EVEN)
    else:
        step = torch_side(Path(base), None if name == "floor" else Path(patch), work, defaults=name == "peft defaults")
    weights = sum(file.stat().st_size for file in Path(base).glob("*.safetensors"))
    serve(step, imports_bytes=imports, weights_bytes=weights)


def measure(shape: str, rows: str, pairs: int, before: Path | None = None) -> dict[str, Any]:
    """Every side in turn. `before`: another checkout of lorakit, a side of its own called BEFORE."""
    base = make_base(scratch(), shape, torch.float32)
    patch = make_patch(scratch(), base, rank=RANK, seed=0)
    names = [*SIDES, *([EVEN] if rows == "chat" else []), *([BEFORE] if before else [])]
    checkouts = {BEFORE: before}
    sides = {
        name: Side("benchmarks.step", name, str(base), str(patch), rows, checkout=checkouts.get(name)) for name in names
    }
    found = answers_of(sides, pairs)
    skeleton: Any = load_skeleton(base)
    return {
        "shape": shape, "rows": rows, "rank": RANK, "dtype": "float32", "sides": names,
        "ready": {name: one.ready for name, one in sides.items()}, **found,
        "flops_of_a_token": flops(skeleton, lengths_of(rows, 0), RANK, 1.0 if rows == "even" else 0.5),
        "matmul_flops": matmul_rate(skeleton.config.to_dict(), 1024), "copy_bytes_per_second": copy_rate(),
    }  # fmt: skip


def over_weights(result: dict[str, Any], name: str) -> int:
    """Peak memory of a side above its imports and the weights."""
    ready = result["ready"][name]
    over: int = result[name][-1]["peak_bytes"] - ready["imports_bytes"] - ready["weights_bytes"]
    return over


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
    matmul, copied = result["matmul_flops"] / 1e9, result["copy_bytes_per_second"] / 1e9
    print(f"ceilings of this machine: matmul {matmul:.0f} GFLOP/s, copy {copied:.1f} GB/s read and written")


if __name__ == "__main__":
    program("step-{shape}-{rows}", measure, show, shape="100M", rows=("even", "half", "chat"), pairs=7)
