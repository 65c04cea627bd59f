"""A DPO step beside TRL's, on the same pairs and from the same adapter (O1).

    python -m benchmarks.pairs [--shape 100M] [--pairs 5] [--keep]

Both read log p at the run's start, and neither computes it: TRL's `precompute_ref_log_probs`. TRL trains PEFT in its
best form (SDPA, `autocast_adapter_dtype=False`, fused AdamW, no checkpointing) through `DPOTrainer.compute_loss`, in a
loop without Trainer's extras. A step is four pairs of mixed lengths (log-normal); the answers are half of each, and the
prompt of a pair is the same. A result counts only when the loss of every step agrees.
"""

import math
import sys
import time
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.machine import CPU, peak_bytes, program, scratch, table
from benchmarks.models import make_base, make_patch
from benchmarks.rows import Row, Rows, packed
from benchmarks.sides import CLIP, RANK, adamw, lorakit_engine, patch_tensors
from benchmarks.step import over_weights
from benchmarks.turns import Side, Step, answers_of, middle, ratio, serve
from lorakit.base.transformers_io import load_base
from lorakit.launch.libraries import limit_kernel_caches
from lorakit.objectives.pairs import build_objective

SIDES = ("lorakit", "trl")
PAIRS = 4
BETA = 0.1
AGREES = 1e-5
VOCABULARY = 32_000


def rows_of(seed: int) -> tuple[Rows, Tensor]:
    """Eight rows, of which two each have one prompt, and a made-up log p at the run's start for each."""
    numbers = np.random.default_rng(seed)
    rows = Rows()
    for length in np.clip(numbers.lognormal(math.log(96), 0.8, size=PAIRS), 16, 512).astype(int):
        prompt = numbers.integers(5, VOCABULARY, length)
        for answer in (length, max(8, length // 2)):
            ids = np.concatenate([prompt, numbers.integers(5, VOCABULARY, answer)])
            rows.append(Row(ids, np.arange(len(ids)) >= length))
    references = [-10.4 * row.label_mask.sum() + numbers.normal() for row in rows]
    return rows, torch.tensor(references, dtype=torch.float32)


def lorakit_side(base: Path, patch: Path) -> Step:
    """lorakit's own engine on packed rows."""
    limit_kernel_caches("float32")
    adapter = patch_tensors(patch)
    objective = build_objective("dpo", {"beta": BETA, "sft_weight": 0.0})
    engine = lorakit_engine(load_base(base, torch.float32, CPU), adapter, CPU, objective)
    number = 0

    def step() -> dict[str, Any]:
        nonlocal number
        rows, references = rows_of(number)
        batch = replace(packed(rows), row_references=references)
        began = time.perf_counter()
        report = engine.step(number, [batch])
        number += 1
        return {"seconds": time.perf_counter() - began, "loss": report.loss}

    return step


def trl_side(base: Path, patch: Path, folder: Path) -> Step:
    """TRL's trainer with PEFT's adapter."""
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    from lorakit.base.find import find_base

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, patch, is_trainable=True, autocast_adapter_dtype=False)
    config = DPOConfig(
        output_dir=str(folder), beta=BETA, report_to=[], use_cpu=True, bf16=False, precompute_ref_log_probs=True,
        max_length=None,
    )  # fmt: skip
    trainer = DPOTrainer(
        model=model, args=config, processing_class=PreTrainedTokenizerFast.from_pretrained(find_base("builtin:tiny")),
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": " b", "rejected": " c"}]),
    )  # fmt: skip
    optimizer = adamw(model, fused=True)
    model.train()
    number = 0

    def step() -> dict[str, Any]:
        nonlocal number
        rows, references = rows_of(number)
        number += 1
        examples = []
        for index in range(0, len(rows), 2):
            chosen, rejected = rows[index], rows[index + 1]
            start = int(chosen.label_mask.argmax())
            examples.append({
                "prompt_ids": chosen.ids[:start].tolist(), "chosen_ids": chosen.ids[start:].tolist(),
                "rejected_ids": rejected.ids[start:].tolist(), "ref_chosen_logps": float(references[index]),
                "ref_rejected_logps": float(references[index + 1]),
            })  # fmt: skip
        inputs = trainer.data_collator(examples)
        began = time.perf_counter()
        loss = trainer.compute_loss(model, inputs)  # type: ignore[no-untyped-call]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return {"seconds": time.perf_counter() - began, "loss": float(loss.detach())}

    return step


def side(name: str, base: str, patch: str, folder: str) -> None:
    """One side, in this process."""
    with redirect_stdout(sys.stderr):  # because TRL's libraries write there, where the answers go
        if name == "trl":
            import trl.trainer.dpo_trainer  # noqa: F401
        imports = peak_bytes()
        two = Path(base), Path(patch)
        step = lorakit_side(*two) if name == "lorakit" else trl_side(*two, Path(folder))
    weights = sum(file.stat().st_size for file in Path(base).glob("*.safetensors"))
    serve(step, imports_bytes=imports, weights_bytes=weights)


def measure(shape: str, pairs: int) -> dict[str, Any]:
    """Both sides in turn."""
    base = make_base(scratch(), shape, torch.float32)
    patch = make_patch(scratch(), base, rank=RANK, seed=0)
    sides = {name: Side("benchmarks.pairs", name, str(base), str(patch), str(scratch())) for name in SIDES}
    taken = answers_of(sides, pairs)
    ready = {name: one.ready for name, one in sides.items()}
    return {"shape": shape, "rank": RANK, "dtype": "float32", "ready": ready, **taken}


def rates(result: dict[str, Any]) -> dict[str, float]:
    """The figures that targets speak of."""
    above = {name: over_weights(result, name) for name in SIDES}
    return {
        "DPO step / trl": ratio(result["lorakit"], result["trl"]),
        "DPO memory / trl": above["lorakit"] / above["trl"],
    }


def show(result: dict[str, Any]) -> None:
    """The table, and the check that both did the same work."""
    off = max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(result["lorakit"], result["trl"], strict=True))
    assert off < AGREES, f"not the same work, losses differ by {off:.1e}"
    print(f"{result['shape']}, {PAIRS} pairs a step, float32, rank {RANK} on all linear layers\n")
    lines = [("", "seconds", "MB over imports and weights")]
    lines += [(name, f"{middle(result[name]):.3f}", f"{over_weights(result, name) / 1e6:.0f}") for name in SIDES]
    table(lines)
    print()
    for name, rate in rates(result).items():
        print(f"{name:<42} {rate:.3f}")


if __name__ == "__main__":
    program("pairs-{shape}", measure, show, shape="100M", pairs=5)
