"""What `lorakit plan` predicts beside what runs take: peak memory of a process, on CPUs.

    python -m benchmarks.plan [--only fsdp2] [--keep]

Every run is a whole `lorakit train` of three steps in processes of its own, on a random Llama; measured is the most
that was resident in any of them (VmHWM), predicted is the plan made before it from config, headers and rows alone.
"""

import argparse
import json
import os
import random
import shutil
import socket
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
    "90M": {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 10, "num_attention_heads": 12,
            "num_key_value_heads": 4, "vocab_size": 16000},
    "160M": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16,
             "num_key_value_heads": 8, "vocab_size": 32000},
}  # fmt: skip
STEPS = 3


@dataclass(frozen=True)
class Case:
    """One run: rows of ``tokens`` tokens, ``lines`` of them in a micro-batch."""

    backend: str
    processes: int
    base: str
    tokens: int
    rows: int
    recompute: str
    stored: str = "float32"
    dtype: str = "float32"

    def name(self) -> str:
        return "-".join(str(value) for value in asdict(self).values())


CASES = [
    Case("single", 1, "40M", 512, 1, "none"), Case("single", 1, "40M", 1024, 2, "layers"),
    Case("single", 1, "90M", 256, 1, "none"), Case("single", 1, "90M", 512, 2, "none"),
    Case("single", 1, "90M", 1024, 1, "layers"), Case("single", 1, "160M", 256, 2, "layers"),
    Case("single", 1, "90M", 256, 1, "layers", "bfloat16"), Case("single", 1, "40M", 128, 1, "none", "bfloat16", "bfloat16"),
    Case("ddp", 2, "40M", 512, 1, "none"), Case("ddp", 2, "90M", 256, 2, "none"),
    Case("ddp", 2, "160M", 256, 1, "layers"), Case("ddp", 4, "40M", 256, 1, "layers"),
    Case("zero1", 2, "90M", 256, 1, "none"), Case("zero1", 2, "40M", 512, 2, "layers"),
    Case("zero2", 2, "90M", 512, 1, "layers"), Case("zero2", 2, "40M", 512, 1, "none"), Case("zero2", 4, "40M", 256, 1, "none"),
    Case("zero3", 1, "90M", 256, 1, "none"), Case("zero3", 2, "40M", 512, 1, "none"), Case("zero3", 2, "90M", 256, 2, "none"),
    Case("zero3", 2, "90M", 256, 1, "layers"), Case("zero3", 2, "160M", 256, 1, "layers"), Case("zero3", 4, "40M", 256, 1, "layers"),
    Case("fsdp2", 1, "90M", 256, 1, "none"), Case("fsdp2", 2, "40M", 512, 1, "none"), Case("fsdp2", 2, "90M", 256, 2, "none"),
    Case("fsdp2", 2, "90M", 1024, 1, "layers"), Case("fsdp2", 2, "160M", 256, 1, "layers"), Case("fsdp2", 4, "40M", 256, 1, "layers"),
    Case("fsdp2", 2, "40M", 128, 1, "none", "bfloat16", "bfloat16"),
]  # fmt: skip


def make_base(shape: str, stored: str) -> Path:
    """A random Llama with the built-in tokenizer; kept for the next run."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from lorakit.model import find_base, load_tokenizer

    target = scratch() / f"plan-{shape}-{stored}"
    if not (target / "tokenizer.json").exists():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**LLAMAS[shape], max_position_embeddings=8192))
        model.to(getattr(torch, stored)).save_pretrained(target)
        load_tokenizer(find_base("builtin:tiny")).save_pretrained(target)
    return target


def make_recipe(case: Case, folder: Path) -> Path:
    """The recipe of a run, and its rows: random words, cut to the same length."""
    words = ["so", "many", "of", "the", "green", "birds", "sing", "in", "old", "towns", "and", "we", "hear", "them"]
    g = random.Random(0)
    rows = folder / "rows.jsonl"
    count = case.processes * case.rows * STEPS
    rows.write_text(
        "".join(json.dumps({"text": " ".join(g.choices(words, k=case.tokens))}) + "\n" for _ in range(count))
    )
    recipe = {
        "base": {"model": str(make_base(case.base, case.stored)), "dtype": case.dtype},
        "data": {"train": str(rows), "max_tokens": case.tokens, "on_long_rows": "truncate", "loss_on": "all"},
        "train": {"steps": STEPS, "batch_size": case.processes * case.rows, "micro_batch_size": case.rows,
                  "activation_checkpointing": case.recompute},
        "parallel": {"backend": case.backend, "processes": case.processes},
        "output": str(folder / "out"),
    }  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    return path


def train_here(recipe: str) -> None:
    """One process of a run, and what it took."""
    from lorakit.cli import main
    from lorakit.plan.heap import give_back_freed_blocks

    give_back_freed_blocks()
    code = main(["train", recipe])
    status = Path("/proc/self/status").read_text().splitlines()
    peak = int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024
    print(json.dumps({"peak_bytes": peak}), flush=True)
    raise SystemExit(code)


def run(case: Case, recipe: Path) -> list[int]:
    """Peak bytes of every process of a run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(case.processes):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if case.backend != "single":
            environment |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.processes),
                "LOCAL_WORLD_SIZE": str(case.processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
        log = open(recipe.parent / f"rank-{rank}.log", "w")  # noqa: SIM115 - closed with the process
        started.append((subprocess.Popen(
            python("-m", "benchmarks.plan", "--train", str(recipe)), env=environment, stdout=log, stderr=log, text=True
        ), log))  # fmt: skip
    codes = [process.wait() for process, _ in started]
    texts = [(recipe.parent / f"rank-{rank}.log").read_text() for rank in range(case.processes)]
    if any(codes):
        raise RuntimeError(f"{case}: exit codes {codes}\n{texts[codes.index(next(filter(None, codes)))][-2000:]}")
    return [
        json.loads(next(line for line in text.splitlines() if line.startswith('{"peak')))["peak_bytes"]
        for text in texts
    ]


def measure(case: Case) -> dict[str, Any]:
    """A plan, then the run it is of."""
    from lorakit.plan import run as plan_of
    from lorakit.recipe import load_recipe

    folder = scratch() / "plan-run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    recipe = make_recipe(case, folder)
    plan = plan_of(load_recipe(recipe))
    way = next(row.way for row in plan.advice.rows if row.way.backend == case.backend)
    began = time.perf_counter()
    peaks = run(case, recipe)
    return {
        **asdict(case), "predicted_bytes": way.memory.peak, "predicted": asdict(way.memory), "peaks": peaks,
        "error": way.memory.peak / max(peaks) - 1, "seconds": time.perf_counter() - began,
    }  # fmt: skip


def show(found: list[dict[str, Any]]) -> None:
    """The table, the worst and the median error, and whether anything said to fit would have failed."""
    from lorakit.plan.memory import MARGIN

    rows = [("run", "base", "tokens", "recompute", "predicted MB", "measured MB", "error")]
    for one in found:
        dtype = one["dtype"] if one["stored"] == one["dtype"] else f"{one['stored']} as {one['dtype']}"
        rows.append((
            f"{one['backend']} x {one['processes']}", f"{one['base']} {dtype}", f"{one['rows']} x {one['tokens']}",
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
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train_here(options.train)
    found = []
    for case in CASES:
        if options.only is None or options.only in case.name():
            found.append(measure(case))
            print(
                json.dumps({key: found[-1][key] for key in ("backend", "processes", "base", "error")}), file=sys.stderr
            )
    show(found)
    if options.keep:
        keep("plan", {"steps": STEPS, "runs": found})


if __name__ == "__main__":
    main()
