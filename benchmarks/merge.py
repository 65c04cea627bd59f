"""Merging files into files, beside `cp` + fsync of the same files and beside PEFT (C6).

    python -m benchmarks.merge [--shape 1.1B] [--pairs 5] [--keep]

Every round runs `cp -r` + sync, `lorakit merge` and PEFT's merge_and_unload + save_pretrained, each in a process of its
own, one after the other. A process prints how long the work took without its imports, and its peak memory; the whole
command is timed from outside.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import keep, python, scratch, table
from benchmarks.models import make_base, make_patch

PEAK = """
import json, sys, time
def peak():  # not ru_maxrss, which begins with what the parent process held
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
"""
LORAKIT = """
import lorakit, transformers
from pathlib import Path
from lorakit.model import load_skeleton
base, patch, out = sys.argv[1:]
merge = lorakit.merge
load_skeleton(Path(base))
imports = peak()
began = time.perf_counter()
merge(base, patch, out=out)
"""
PEFT = """
import os, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import PeftModel
base, patch, out = sys.argv[1:]
imports = peak()
began = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
PeftModel.from_pretrained(model, patch).merge_and_unload().save_pretrained(out, max_shard_size="500MB")
AutoTokenizer.from_pretrained(base).save_pretrained(out)
os.sync()
"""
ANSWER = """
print(json.dumps({"seconds": time.perf_counter() - began, "peak_bytes": peak(), "imports_bytes": imports}))
"""


def copied(base: Path, out: Path) -> dict[str, float]:
    """cp and fsync of the same files."""
    began = time.perf_counter()
    subprocess.run(f"cp -r '{base}' '{out}' && sync '{out}'/* '{out}'", shell=True, check=True)
    return {"seconds": time.perf_counter() - began}


def run(program: str, base: Path, patch: Path, out: Path) -> dict[str, float]:
    """One merge in a process of its own."""
    began = time.perf_counter()
    command = python("-c", PEAK + program + ANSWER, str(base), str(patch), str(out))
    done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {**answer, "command_seconds": time.perf_counter() - began}


def measure(shape: str, pairs: int, dtype: torch.dtype, rank: int, peft: bool) -> dict[str, Any]:
    """Rounds of copy, lorakit and PEFT."""
    base = make_base(scratch(), shape, dtype)
    patch = make_patch(scratch(), base, rank=rank, seed=0)
    files = sorted(base.glob("*.safetensors"))
    found: dict[str, list[dict[str, float]]] = {"cp": [], "lorakit": [], "peft": []}
    out = scratch() / "out"
    for _ in range(pairs):
        for kind in ("cp", "lorakit", *(["peft"] if peft else [])):
            shutil.rmtree(out, ignore_errors=True)
            os.sync()
            program = {"lorakit": LORAKIT, "peft": PEFT}.get(kind, "")
            found[kind].append(copied(base, out) if kind == "cp" else run(program, base, patch, out))
    shutil.rmtree(out)
    return {
        "shape": shape, "dtype": str(dtype), "rank": rank, "files": len(files),
        "bytes": sum(file.stat().st_size for file in files), "largest_tensor_bytes": largest(base), **found,
    }  # fmt: skip


def largest(base: Path) -> int:
    """Bytes of the largest stored tensor."""
    from lorakit.patch import open_base_files

    return max(e.end - e.start for shard in open_base_files(base).shards for e in shard.entries.values())


def rates(result: dict[str, Any]) -> dict[str, float]:
    """The figures that the target speaks of."""
    found = {"merge / (cp + fsync)": statistics.median(
        a["seconds"] / b["seconds"] for a, b in zip(result["lorakit"], result["cp"], strict=True)
    )}  # fmt: skip
    limit = 2 * result["largest_tensor_bytes"] + 100e6
    above = statistics.median(one["peak_bytes"] - one["imports_bytes"] for one in result["lorakit"])
    return found | {"merge memory / allowed": above / limit}


def show(result: dict[str, Any]) -> None:
    """The table."""

    def middle(kind: str, what: str) -> float:
        return statistics.median(one[what] for one in result[kind])

    def ratio(kind: str) -> float:
        return statistics.median(a["seconds"] / b["seconds"] for a, b in zip(result[kind], result["cp"], strict=True))

    print(f"{result['bytes'] / 1e9:.2f} GB in {result['files']} files, {result['dtype']}, rank {result['rank']}\n")
    rows = [("", "seconds", "/ (cp + fsync)", "whole command, s", "peak MB", "peak - imports, MB")]
    rows.append(("cp + fsync", f"{middle('cp', 'seconds'):.2f}", "1.00", "", "", ""))
    for kind in ("lorakit", "peft"):
        if result[kind]:
            peak, imports = middle(kind, "peak_bytes"), middle(kind, "imports_bytes")
            rows.append((
                f"{kind} merge", f"{middle(kind, 'seconds'):.2f}", f"{ratio(kind):.2f}",
                f"{middle(kind, 'command_seconds'):.2f}", f"{peak / 1e6:.0f}", f"{(peak - imports) / 1e6:.0f}",
            ))  # fmt: skip
    table(rows)
    limit = (2 * result["largest_tensor_bytes"] + 100e6) / 1e6
    print(f"\nallowed over imports: 2 x the largest tensor + 100 MB = {limit:.0f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="1.1B")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--no-peft", action="store_true")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/")
    options = parser.parse_args()
    figures = measure(options.shape, options.pairs, getattr(torch, options.dtype), options.rank, not options.no_peft)
    show(figures)
    if options.keep:
        keep(f"merge-{options.shape}", figures)
