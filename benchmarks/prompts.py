"""A step of groups of answers to one prompt: the prompt computed once, beside computed for each answer (O2).

    python -m benchmarks.prompts [--shape 100M] [--pairs 5] [--keep]

A step is a group of eight answers to a prompt that is three answers long. Both sides are lorakit's own engine on packed
rows, on the cross-entropy of the answers. A result counts only when the loss of every step agrees.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import CPU, peak_bytes, program, scratch, table
from benchmarks.models import make_base, make_patch
from benchmarks.pairs import AGREES, VOCABULARY
from benchmarks.rows import Row, Rows, packed
from benchmarks.sides import RANK, lorakit_engine, patch_tensors
from benchmarks.step import over_weights
from benchmarks.turns import Side, Step, answers_of, middle, ratio, serve
from lorakit.base.transformers_io import load_base
from lorakit.launch.libraries import limit_kernel_caches
from lorakit.objectives.objective import SFT

SIDES = ("shared", "apart")
GROUP = 8
ANSWER = 64


def rows_of(seed: int) -> Rows:
    """One prompt with eight answers of about a third of its length."""
    numbers = np.random.default_rng(seed)
    prompt = numbers.integers(5, VOCABULARY, 3 * ANSWER)
    rows = Rows()
    for length in numbers.integers(ANSWER // 2, 3 * ANSWER // 2, GROUP):
        ids = np.concatenate([prompt, numbers.integers(5, VOCABULARY, length)])
        rows.append(Row(ids, np.arange(len(ids)) >= len(prompt)))
    return rows


def lorakit_side(name: str, base: Path, patch: Path) -> Step:
    limit_kernel_caches("float32")
    engine = lorakit_engine(load_base(base, torch.float32, CPU), patch_tensors(patch), CPU, SFT)
    number = 0

    def step() -> dict[str, Any]:
        nonlocal number
        batch = packed(rows_of(number), group=GROUP if name == "shared" else 1)
        began = time.perf_counter()
        report = engine.step(number, [batch])
        number += 1
        return {"seconds": time.perf_counter() - began, "loss": report.loss}

    return step


def side(name: str, base: str, patch: str) -> None:
    """One side, in this process."""
    imports = peak_bytes()
    step = lorakit_side(name, Path(base), Path(patch))
    weights = sum(file.stat().st_size for file in Path(base).glob("*.safetensors"))
    serve(step, imports_bytes=imports, weights_bytes=weights)


def measure(shape: str, pairs: int) -> dict[str, Any]:
    """Both sides in turn."""
    base = make_base(scratch(), shape, torch.float32)
    patch = make_patch(scratch(), base, rank=RANK, seed=0)
    sides = {name: Side("benchmarks.prompts", name, str(base), str(patch)) for name in SIDES}
    taken = answers_of(sides, pairs)
    ready = {name: one.ready for name, one in sides.items()}
    return {"shape": shape, "rank": RANK, "dtype": "float32", "ready": ready, **taken}


def rates(result: dict[str, Any]) -> dict[str, float]:
    """The figures that targets speak of."""
    above = {name: over_weights(result, name) for name in SIDES}
    return {
        "step with a shared prompt / apart": ratio(result["shared"], result["apart"]),
        "memory with a shared prompt / apart": above["shared"] / above["apart"],
    }


def show(result: dict[str, Any]) -> None:
    """The table, and the check that both did the same work."""
    off = max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(result["shared"], result["apart"], strict=True))
    assert off < AGREES, f"not the same work, losses differ by {off:.1e}"
    print(f"{result['shape']}, {GROUP} answers to a prompt three answers long, float32, rank {RANK}\n")
    lines = [("", "seconds", "MB over imports and weights")]
    lines += [(name, f"{middle(result[name]):.3f}", f"{over_weights(result, name) / 1e6:.0f}") for name in SIDES]
    table(lines)
    print()
    for name, rate in rates(result).items():
        print(f"{name:<42} {rate:.3f}")


if __name__ == "__main__":
    program("prompts-{shape}", measure, show, shape="100M", pairs=5)
