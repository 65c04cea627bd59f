"""A training step beside the frozen base's forward and backward, and beside PEFT (C1, C2, C4).

    python -m benchmarks.step [--shape 100M] [--pairs 7] [--learnt 1.0] [--keep]

Four sides on the same rows: the frozen base alone, lorakit, PEFT in its best form (SDPA, autocast_adapter_dtype=False,
fused AdamW) and PEFT as it comes. The adapters start from the same patch with B non-zero, and count only when the
loss of every step agrees.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import facts, keep, matmul_rate, peak_bytes, scratch, table
from benchmarks.models import make_base, make_patch
from benchmarks.turns import Side, Step, middle, ratio, serve, take_turns

LINES, TOKENS, RANK, RATE = 4, 256, 16, 1e-4
SIDES = ("floor", "lorakit", "peft", "peft defaults")
AGREES = 1e-6


def rows(base: Path, learnt: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random token ids (lines, tokens), and which of them are learnt: the last part of every line, as in a chat."""
    import json

    numbers = torch.Generator().manual_seed(seed)
    size = json.loads((base / "config.json").read_text())["vocab_size"]
    ids = torch.randint(0, size, (LINES, TOKENS), generator=numbers)
    return ids, (torch.arange(TOKENS) >= round(TOKENS * (1 - learnt))).expand(LINES, TOKENS)


def lorakit_side(base: Path, patch: Path, learnt: float) -> Step:
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
        batch = collate(_Rows(*rows(base, learnt, number)), list(range(LINES)), packing=True)  # type: ignore[arg-type]
        began = time.perf_counter()
        report = engine.step(number, [batch])
        number += 1
        return {"seconds": time.perf_counter() - began, "loss": report.loss}

    return step


class _Rows:
    """Rows as lorakit's data gives them."""

    def __init__(self, ids: torch.Tensor, learnt: torch.Tensor) -> None:
        self._ids, self._learnt = ids.numpy(), learnt.numpy()

    def ids(self, row: int) -> Any:
        return self._ids[row]

    def learnt(self, row: int) -> Any:
        return self._learnt[row]


def torch_side(base: Path, patch: Path | None, learnt: float, *, defaults: bool) -> Step:
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
        ids, marked = rows(base, learnt, number)
        labels = torch.where(marked, ids, -100)
        number += 1
        began = time.perf_counter()
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        if optimizer is not None:
            torch.nn.utils.clip_grad_norm_(learning, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return {"seconds": time.perf_counter() - began, "loss": float(loss)}

    return step


def side(name: str, base: Path, patch: Path, learnt: float) -> None:
    """One side, in this process."""
    import peft  # noqa: F401
    import transformers  # noqa: F401

    imports = peak_bytes()
    if name == "lorakit":
        step = lorakit_side(base, patch, learnt)
    else:
        step = torch_side(base, None if name == "floor" else patch, learnt, defaults=name == "peft defaults")
    weights = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    serve(step, imports_bytes=imports, weights_bytes=weights)


def measure(shape: str, pairs: int, learnt: float) -> dict[str, Any]:
    """Every side in turn."""
    base = make_base(scratch(), shape, torch.float32)
    patch = make_patch(scratch(), base, rank=RANK, seed=0)
    sides = {
        name: Side("-m", "benchmarks.step", "--side", name, "--base", str(base), "--patch", str(patch),
                   "--learnt", str(learnt))
        for name in SIDES
    }  # fmt: skip
    found = take_turns(sides, pairs)
    for one in sides.values():
        one.end()
    return {
        "shape": shape, "lines": LINES, "tokens": TOKENS, "rank": RANK, "dtype": "float32", "learnt": learnt,
        "ready": {name: one.ready for name, one in sides.items()}, **found,
        "flops": flops(base, learnt), "matmul_flops": matmul_rate(base, LINES * TOKENS),
    }  # fmt: skip


def flops(base: Path, learnt: float) -> float:
    """Useful operations of a step: 4 P + 6 s h L + 6 P of the adapter a token; the head where something is learnt."""
    import json

    from lorakit.lora import AdapterSpec, find_targets
    from lorakit.model import load_skeleton

    config = json.loads((base / "config.json").read_text())
    targets = find_targets(load_skeleton(base), AdapterSpec(rank=RANK))
    products = sum(t.in_features * t.out_features for t in targets)
    head = config["vocab_size"] * config["hidden_size"]
    low_rank = sum(RANK * (t.in_features + t.out_features) for t in targets)
    attention = 6 * TOKENS / 2 * config["hidden_size"] * config["num_hidden_layers"]
    return LINES * TOKENS * (4.0 * (products + learnt * head) + attention + 6.0 * low_rank)


def show(result: dict[str, Any]) -> None:
    """The table, and the check that all did the same work."""
    for name in ("peft", "peft defaults"):
        off = max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(result["lorakit"], result[name], strict=True))
        assert off < AGREES, f"{name}: not the same work, losses differ by {off:.1e}"
    print(
        f"{result['shape']}, {LINES} x {TOKENS} tokens, {result['learnt']:.0%} of them learnt, float32,"
        f" rank {RANK} on all linear layers\n"
    )
    head = ("", "seconds", "/ floor", "tokens/s", "of matmul", "MB over imports and weights")
    lines = [head]
    for name in SIDES:
        seconds, ready = middle(result[name]), result["ready"][name]
        above = result[name][-1]["peak_bytes"] - ready["imports_bytes"] - ready["weights_bytes"]
        lines.append((
            name, f"{seconds:.3f}", f"{ratio(result[name], result['floor']):.3f}",
            f"{LINES * TOKENS / seconds:.0f}", f"{result['flops'] / seconds / result['matmul_flops']:.0%}",
            f"{above / 1e6:.0f}",
        ))  # fmt: skip
    table(lines)
    print(f"\nlorakit / PEFT's best: {1 / ratio(result['lorakit'], result['peft']):.3f} x its tokens/s")
    print(f"matmul at these shapes: {result['matmul_flops'] / 1e9:.0f} GFLOP/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="100M")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--learnt", type=float, default=1.0)
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/")
    parser.add_argument("--side")
    parser.add_argument("--base", type=Path)
    parser.add_argument("--patch", type=Path)
    options = parser.parse_args()
    if options.side:
        side(options.side, options.base, options.patch, options.learnt)
    else:
        print(facts()["hardware"])
        figures = measure(options.shape, options.pairs, options.learnt)
        show(figures)
        if options.keep:
            keep(f"step-{options.shape}-{options.learnt:g}", figures)
