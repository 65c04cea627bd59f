"""What `lorakit plan` predicts beside what runs take: peak memory of a process, on CPUs.

    python -m benchmarks.plan [--only fsdp2] [--keep]
    python -m benchmarks.plan --process               # the constants of a process in lorakit/planning/memory.py

Every run is a whole `lorakit train` of 200 steps in processes of its own, on the built-in base or a random Llama, with
rows of varied lengths, because in 16 bits memory grows with the number of shapes. Measured is the most that any of them
held (VmHWM), predicted is the plan made before it from config, headers and rows alone.
"""

import argparse
import importlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import keep, python, scratch, table

LLAMAS: dict[str, dict[str, int]] = {
    "40M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
            "num_key_value_heads": 4, "vocab_size": 16000},
}  # fmt: skip
STEPS = 200


@dataclass(frozen=True)
class Case:
    """One run: rows of up to ``tokens`` tokens, ``rows`` of them in a micro-batch."""

    backend: str
    processes: int
    base: str
    tokens: int
    rows: int
    recompute: str
    stored: str = "float32"
    dtype: str = "float32"
    quantize: str = "none"
    method: str = "lora"
    optimizer: str = "adamw"
    packing: bool = True

    def name(self) -> str:
        return "-".join(str(value) for value in asdict(self).values())


CASES: list[tuple[Any, ...]] = [
    ("single", 1, "tiny", 128, 8, "none", "bfloat16", "bfloat16"),
    ("single", 1, "tiny", 128, 8, "none", "bfloat16", "bfloat16", "none", "lora", "adamw", False),
    ("single", 1, "40M", 128, 4, "none", "bfloat16", "bfloat16"),
    ("single", 1, "tiny", 128, 8, "none"),
    ("single", 1, "40M", 128, 2, "none"),
    ("fsdp2", 2, "tiny", 128, 4, "none", "bfloat16", "bfloat16"),
    ("zero3", 2, "tiny", 128, 4, "none", "bfloat16", "bfloat16"),
    ("ddp", 2, "tiny", 128, 4, "none", "bfloat16", "bfloat16"),
    ("ddp", 2, "40M", 128, 2, "none"),
    ("zero2", 2, "40M", 128, 2, "none"),
    ("zero3", 2, "40M", 128, 2, "none"),
    ("fsdp2", 2, "40M", 128, 2, "none"),
    ("single", 1, "40M", 256, 4, "layers"),
    ("single", 1, "40M", 128, 2, "none", "float32", "float32", "nf4"),
    ("single", 1, "40M", 128, 2, "none", "float32", "float32", "none", "dora"),
]
"""Fields of Case."""


def make_base(shape: str, stored: str) -> Path:
    """A random Llama with the built-in tokenizer, kept for the next run; or the built-in base."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from lorakit.base.find import find_base
    from lorakit.base.transformers_io import load_tokenizer

    if shape == "tiny":
        return find_base("builtin:tiny")
    target = scratch() / f"plan-{shape}-{stored}"
    if not (target / "tokenizer.json").exists():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**LLAMAS[shape], max_position_embeddings=8192))
        model.to(getattr(torch, stored)).save_pretrained(target)
        load_tokenizer(find_base("builtin:tiny")).save_pretrained(target)
    return target


def make_recipe(case: Case, folder: Path) -> Path:
    """The recipe of a run, and its rows: random words, from an eighth of the longest row to some that are cut."""
    words = ["so", "many", "of", "the", "green", "birds", "sing", "in", "old", "towns", "and", "we", "hear", "them"]
    g = random.Random(0)
    rows = folder / "rows.jsonl"
    count = case.processes * case.rows * STEPS
    texts = (" ".join(g.choices(words, k=g.randint(case.tokens // 12, case.tokens * 2 // 3))) for _ in range(count))
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    recipe = {
        "base": {"model": str(make_base(case.base, case.stored)), "dtype": case.dtype, "quantize": case.quantize},
        "adapter": {"method": case.method},
        "data": {"train": str(rows), "max_tokens": case.tokens, "on_long_rows": "truncate", "loss_on": "all",
                 "packing": case.packing},
        "train": {"steps": STEPS, "batch_size": case.processes * case.rows, "micro_batch_size": case.rows,
                  "activation_checkpointing": case.recompute, "optimizer": case.optimizer},
        "parallel": {"backend": case.backend, "processes": case.processes},
        "output": str(folder / "out"),
    }  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    return path


def run(recipe: Path) -> list[int]:
    """Peak bytes of every process of a run, as its record tells them."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        python("-m", "lorakit.cli", "train", str(recipe)), env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{recipe.read_text()}: exit code {done.returncode}\n{done.stdout}{done.stderr[-4000:]}")
    record = json.loads((recipe.parent / "out" / "run.json").read_text())
    return [rank["peak_memory_bytes"] for rank in (record["engine"], *record["ranks"])]


def measure_process(dtype: str) -> dict[str, int]:
    """Resident bytes of this process after a step with the built-in base, and what optional packages add to them."""
    from lorakit.launch.libraries import ONEDNN_KERNELS, limit_kernel_caches

    limit_kernel_caches(dtype)  # before the first product
    num_kernels = int(os.environ[ONEDNN_KERNELS])
    import lorakit.training.loop  # noqa: F401 - what a run imports
    from lorakit.base.find import find_base
    from lorakit.base.transformers_io import load_base, load_tokenizer
    from lorakit.data.batch import Batch
    from lorakit.files.safetensors import MODEL_DTYPES
    from lorakit.lora import AdapterSpec, adapter_tensors, attach
    from lorakit.objectives.cross_entropy import LossModel, token_scores
    from lorakit.ops.fuse import fuse_model
    from lorakit.parallel.adapter_state import build_optimizer
    from lorakit.recipe import TrainSection

    folder = find_base("builtin:tiny")
    tokenizer = load_tokenizer(folder)
    model = load_base(folder, MODEL_DTYPES[dtype], torch.device("cpu"))
    attach(model, AdapterSpec(), seed=0)
    fuse_model(model)
    optimizer = build_optimizer(TrainSection(), adapter_tensors(model))
    positions = torch.arange(128).repeat(2)[None]
    ids = torch.ones_like(positions)
    token_scores(
        LossModel(model), Batch(ids, ids, positions, None, (0,), 256, (256,), torch.ones(1))
    ).losses.sum().backward()
    optimizer.step()
    # as a run of many steps: more shapes of products than the matrix library stores kernels of
    weight = torch.ones(64, 64, dtype=MODEL_DTYPES[dtype])
    for num_rows in range(1, 2 * num_kernels):
        _ = torch.ones(num_rows, 64, dtype=weight.dtype) @ weight
    # the matrix library allocates its buffers for larger products only, and never frees them
    _ = torch.ones(256, 1024, dtype=weight.dtype) @ torch.ones(1024, 1024, dtype=weight.dtype)

    def rss_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    measured = {"plain": rss_bytes()}
    for package in ("bitsandbytes", "deepspeed"):
        before = rss_bytes()
        importlib.import_module(package)
        measured[package] = rss_bytes() - before
    del tokenizer
    return measured


def measure(case: Case) -> dict[str, Any]:
    """A plan, then the run it is of."""
    from lorakit.planning import make_plan as plan_of
    from lorakit.recipe import load_recipe

    folder = scratch() / "plan-run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    recipe = make_recipe(case, folder)
    plan = plan_of(load_recipe(recipe))
    way = next(candidate for candidate in plan.backends if candidate.backend == case.backend)
    began = time.perf_counter()
    peaks = run(recipe)
    return {
        **asdict(case), "predicted_bytes": way.memory.peak, "predicted": asdict(way.memory), "peaks": peaks,
        "error": way.memory.peak / max(peaks) - 1, "seconds": time.perf_counter() - began,
    }  # fmt: skip


def show(found: list[dict[str, Any]]) -> None:
    """The table, the worst and the median error, and whether anything said to fit would have failed."""
    from lorakit.planning.memory import MARGIN

    rows = [("run", "base", "adapter", "tokens", "recompute", "predicted MB", "measured MB", "error")]
    for one in found:
        dtype = one["dtype"] if one["stored"] == one["dtype"] else f"{one['stored']} as {one['dtype']}"
        dtype = dtype if one["quantize"] == "none" else f"{dtype} packed as {one['quantize']}"
        adapter = one["method"] if one["optimizer"] == "adamw" else f"{one['method']}, {one['optimizer']}"
        shape = f"{one['rows']} x {one['tokens']}{'' if one['packing'] else ', padded'}"
        rows.append((
            f"{one['backend']} x {one['processes']}", f"{one['base']} {dtype}", adapter,
            shape,
            one["recompute"], f"{one['predicted_bytes'] / 1e6:,.0f}", f"{max(one['peaks']) / 1e6:,.0f}",
            f"{one['error']:+.1%}",
        ))  # fmt: skip
    table(rows)
    errors = [abs(one["error"]) for one in found]
    low = min(one["predicted_bytes"] * (1 + MARGIN) / max(one["peaks"]) for one in found)
    print(
        f"\n{len(found)} runs: worst error {max(errors):.1%}, median {statistics.median(errors):.1%};"
        f" with the margin of {MARGIN:.0%} at least {low:.2f} times what was measured"
    )


def main() -> None:
    """All cases, or those of one backend."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", help="cases whose name holds this")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/")
    parser.add_argument(
        "--process", metavar="DTYPE", nargs="?", const="all", help="the bytes of a process without base"
    )
    options = parser.parse_args()
    if options.process == "all":
        for dtype in ("float32", "bfloat16"):  # each in a process of its own
            subprocess.run(python("-m", "benchmarks.plan", "--process", dtype), check=True)
        return
    if options.process is not None:
        print(options.process, measure_process(options.process))
        return
    found = []
    for case in (Case(*fields) for fields in CASES):
        if options.only is None or options.only in case.name():
            found.append(measure(case))
            print(json.dumps(found[-1]), file=sys.stderr)
    show(found)
    if options.keep:
        keep("plan", {"steps": STEPS, "runs": found})


if __name__ == "__main__":
    main()
