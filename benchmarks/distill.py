"""A step of distillation beside lorakit's own step of sft, and beside TRL's GKD with its teacher in memory.

    python -m benchmarks.distill [--shape 100M] [--pairs 5] [--keep]

The same rows and adapter in all. lorakit reads a made-up table of 64 tokens for each label, whose values do not change
the time. TRL trains PEFT in its best form, as `benchmarks.pairs` has it, on its generalised Jensen-Shannon loss; its
teacher is a model of the same shape, as `GKDTrainer` runs it for given answers. Losses are compared by tests and
not here, because TRL's is of all tokens.
"""

import sys
import time
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.machine import CPU, peak_bytes, program, scratch, table
from benchmarks.models import make_base, make_patch
from benchmarks.pairs import VOCABULARY, rows_of
from benchmarks.rows import Rows, packed
from benchmarks.sides import CLIP, RANK, adamw, lorakit_engine, patch_tensors, peft_model
from benchmarks.step import over_weights
from benchmarks.turns import Side, Step, answers_of, middle, ratio, serve
from lorakit.base.transformers_io import load_base
from lorakit.launch.libraries import limit_kernel_caches
from lorakit.objectives.pairs import build_objective

SIDES = ("sft", "distill", "trl")
TOP_K = 64
BETA = 0.5


def few_rows(seed: int) -> Rows:
    """Two of the pairs' eight rows, because TRL's copies of all logits of eight take more than 22 GB."""
    rows, _ = rows_of(seed)
    return Rows(rows[:2])


def lorakit_side(name: str, base: Path, patch: Path) -> Step:
    """lorakit's own engine on packed rows, with or without a teacher's table."""
    limit_kernel_caches("float32")
    adapter = patch_tensors(patch)
    objective = build_objective(name, {"beta": BETA, "sft_weight": 0.0})
    engine = lorakit_engine(load_base(base, torch.float32, CPU), adapter, CPU, objective)
    number = 0

    def step() -> dict[str, Any]:
        nonlocal number
        rows = few_rows(number)
        batch = packed(rows)
        count = batch.num_label_tokens
        if name == "distill":
            tokens = torch.arange(count)[:, None] + torch.arange(TOP_K)
            log_q = torch.linspace(0, -8, TOP_K + 1).log_softmax(0).repeat(count, 1)
            batch = replace(batch, teacher=(tokens % VOCABULARY, log_q))
        began = time.perf_counter()
        report = engine.step(number, [batch])
        number += 1
        return {"seconds": time.perf_counter() - began, "loss": report.loss}

    return step


def trl_side(base: Path, patch: Path) -> Step:
    """PEFT's adapter, a teacher of the same shape, and TRL's loss."""
    from transformers import AutoModelForCausalLM
    from trl.experimental.gkd import GKDTrainer

    teacher = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), patch_tensors(patch), defaults=False
    )
    optimizer = adamw(model, fused=True)
    number = 0

    def step() -> dict[str, Any]:
        nonlocal number
        rows = few_rows(number)
        number += 1
        ids = [torch.from_numpy(row.ids) for row in rows]
        masks = [torch.from_numpy(row.label_mask) for row in rows]
        labels = [one.masked_fill(~mask, -100) for one, mask in zip(ids, masks, strict=True)]
        inputs = {
            "input_ids": pad_sequence(ids, batch_first=True),
            "attention_mask": pad_sequence([torch.ones_like(one) for one in ids], batch_first=True),
        }
        wanted = pad_sequence(labels, batch_first=True, padding_value=-100)
        began = time.perf_counter()
        with torch.no_grad():
            theirs = teacher(**inputs).logits[:, :-1]
        own = model(**inputs).logits[:, :-1]
        loss = GKDTrainer.generalized_jsd_loss(own, theirs, wanted[:, 1:], beta=BETA)  # type: ignore[no-untyped-call]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return {"seconds": time.perf_counter() - began, "loss": float(loss.detach())}

    return step


def side(name: str, base: str, patch: str) -> None:
    """One side, in this process."""
    with redirect_stdout(sys.stderr):  # because TRL's libraries write there, where the answers go
        if name == "trl":
            import trl.experimental.gkd  # noqa: F401
        imports = peak_bytes()
        two = Path(base), Path(patch)
        step = trl_side(*two) if name == "trl" else lorakit_side(name, *two)
    weights = sum(file.stat().st_size for file in Path(base).glob("*.safetensors"))
    serve(step, imports_bytes=imports, weights_bytes=weights)


def measure(shape: str, pairs: int) -> dict[str, Any]:
    """All sides in turn."""
    base = make_base(scratch(), shape, torch.float32)
    patch = make_patch(scratch(), base, rank=RANK, seed=0)
    sides = {name: Side("benchmarks.distill", name, str(base), str(patch)) for name in SIDES}
    taken = answers_of(sides, pairs)
    ready = {name: one.ready for name, one in sides.items()}
    return {"shape": shape, "rank": RANK, "dtype": "float32", "ready": ready, **taken}


def rates(result: dict[str, Any]) -> dict[str, float]:
    """The figures that the page shows."""
    above = {name: over_weights(result, name) for name in SIDES}
    return {
        "distill step / sft step": ratio(result["distill"], result["sft"]),
        "distill memory / sft memory": above["distill"] / above["sft"],
        "distill step / trl": ratio(result["distill"], result["trl"]),
        "distill memory / trl": above["distill"] / above["trl"],
    }


def show(result: dict[str, Any]) -> None:
    """The table."""
    print(f"{result['shape']}, 2 rows a step, float32, rank {RANK} on all linear layers, top {TOP_K}\n")
    lines = [("", "seconds", "MB over imports and weights")]
    lines += [(name, f"{middle(result[name]):.3f}", f"{over_weights(result, name) / 1e6:.0f}") for name in SIDES]
    table(lines)
    print()
    for name, rate in rates(result).items():
        print(f"{name:<42} {rate:.3f}")


if __name__ == "__main__":
    program("distill-{shape}", measure, show, shape="100M", pairs=5)
