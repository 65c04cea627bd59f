"""Merging files into files, beside `cp` + fsync of the same files and beside PEFT (C6).

    python -m benchmarks.merge [--shape 1.1B] [--pairs 5] [--keep]

Every round runs `cp -r` + sync, `lorakit merge` and PEFT's merge_and_unload + save_pretrained, each in a process of its
own, one after the other. A process prints how long the work took without its imports, and its peak memory; the whole
command is timed from outside. Every side removes the last round's files just before its time starts, because a virtual
machine may give freed memory back to its host within seconds, and writing into it again is then several times slower.
"""

import json
import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import program, python, scratch, table
from benchmarks.models import make_base, make_patch
from benchmarks.turns import Step, middle, ratio, take_turns

PEAK = """
import json, os, shutil, sys, time
def start():
    shutil.rmtree(sys.argv[3], ignore_errors=True)
    os.sync()
    return time.perf_counter()
def peak():  # not ru_maxrss, which begins with what the parent process held
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
"""
LORAKIT = """
import lorakit, transformers
from pathlib import Path
from lorakit.base.transformers_io import load_skeleton
base, patch, out = sys.argv[1:]
merge = lorakit.merge
load_skeleton(Path(base))
imports = peak()
began = start()
merge(base, patch, out=out)
"""
PEFT = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import PeftModel
base, patch, out = sys.argv[1:]
imports = peak()
began = start()
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
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
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


def measure(shape: str, pairs: int, dtype: str, rank: int, no_peft: bool = False) -> dict[str, Any]:
    """Rounds of copy, lorakit and PEFT."""
    base = make_base(scratch(), shape, getattr(torch, dtype))
    patch = make_patch(scratch(), base, rank=rank, seed=0)
    files = sorted(base.glob("*.safetensors"))
    out = scratch() / "out"

    sides: dict[str, Step] = {"cp": lambda: copied(base, out), "lorakit": lambda: run(LORAKIT, base, patch, out)}
    if not no_peft:
        sides["peft"] = lambda: run(PEFT, base, patch, out)
    found = take_turns(sides, pairs, warm=0)
    shutil.rmtree(out)
    return {
        "shape": shape, "dtype": dtype, "rank": rank, "files": len(files),
        "bytes": sum(file.stat().st_size for file in files), "largest_tensor_bytes": largest(base), **found,
    }  # fmt: skip


def largest(base: Path) -> int:
    """Bytes of the largest stored tensor."""
    from lorakit.files.base_files import open_base_files

    return max(e.end - e.start for shard in open_base_files(base).shards for e in shard.entries.values())


def allowed(result: dict[str, Any]) -> float:
    """Bytes that a merge may take over its imports: twice the largest tensor and 100 MB."""
    return float(2 * result["largest_tensor_bytes"] + 100e6)


def rates(result: dict[str, Any]) -> dict[str, float]:
    """The figure that the target speaks of."""
    above = statistics.median(one["peak_bytes"] - one["imports_bytes"] for one in result["lorakit"])
    return {
        "merge / (cp + fsync)": ratio(result["lorakit"], result["cp"]),
        "merge memory / allowed": above / allowed(result),
    }


def show(result: dict[str, Any]) -> None:
    """The table."""
    print(f"{result['bytes'] / 1e9:.2f} GB in {result['files']} files, {result['dtype']}, rank {result['rank']}\n")
    rows = [("", "seconds", "/ (cp + fsync)", "whole command, s", "peak MB", "peak - imports, MB")]
    rows.append(("cp + fsync", f"{middle(result['cp']):.2f}", "1.00", "", "", ""))
    for kind in ("lorakit", "peft"):
        if rounds := result.get(kind):
            peak, imports = middle(rounds, "peak_bytes"), middle(rounds, "imports_bytes")
            rows.append((
                f"{kind} merge", f"{middle(rounds):.2f}", f"{ratio(rounds, result['cp']):.2f}",
                f"{middle(rounds, 'command_seconds'):.2f}", f"{peak / 1e6:.0f}", f"{(peak - imports) / 1e6:.0f}",
            ))  # fmt: skip
    table(rows)
    print(f"\nallowed over imports: 2 x the largest tensor + 100 MB = {allowed(result) / 1e6:.0f} MB")


if __name__ == "__main__":
    program("merge-{shape}", measure, show, shape="1.1B", pairs=5, rank=16, dtype="bfloat16", no_peft=False)
