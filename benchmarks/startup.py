"""From a command's start to the end of its first step: `lorakit train` beside a script with PEFT and Trainer (C5).

    python -m benchmarks.startup [--pairs 5] [--keep]

Both read the same rows, put the same adapter on the same tiny base and train; a command is stopped after its first
step. The importing of torch alone is measured beside them: neither can be faster.
"""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import program, python, scratch, table
from benchmarks.models import make_base
from benchmarks.turns import BEFORE, middle, ratio, take_turns

TRAINER = """
import sys
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainerCallback, TrainingArguments,
)
base, rows, out = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(base)
model = get_peft_model(
    AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
)
def encode(row):
    prompt = tokenizer(row["prompt"], add_special_tokens=False).input_ids
    answer = tokenizer(row["completion"], add_special_tokens=False).input_ids
    return {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}
data = load_dataset("json", data_files=rows, split="train").map(encode, remove_columns=["prompt", "completion"])
class Told(TrainerCallback):
    def on_step_end(self, *_, **__):
        print("stepped", flush=True)
Trainer(
    model=model, train_dataset=data, callbacks=[Told()], data_collator=DataCollatorForSeq2Seq(tokenizer),
    args=TrainingArguments(output_dir=out, max_steps=1, per_device_train_batch_size=8, report_to=[], use_cpu=True),
).train()
"""
RECIPE = """
base: {{model: {base}, dtype: float32}}
adapter: {{rank: 8, alpha: 16}}
data: {{train: {rows}, max_tokens: 128}}
train: {{steps: 1, batch_size: 8, micro_batch_size: 8}}
output: {out}
"""


def rows_file() -> Path:
    """200 rows of a prompt and a completion."""
    path = scratch() / "startup-rows.jsonl"
    row = "Mira from Oslo ordered {} lamps on Monday."
    path.write_text("".join(
        json.dumps({"prompt": row.format(n), "completion": f" {n} lamps."}) + "\n" for n in range(200)
    ))  # fmt: skip
    return path


def until_first_step(command: list[str], stepped: Any, checkout: Path | None = None) -> dict[str, float]:
    """Seconds until ``stepped(process)``; the process is ended then."""
    began, pipe = time.perf_counter(), subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=subprocess.DEVNULL, text=True, cwd=checkout)
    stepped(process)
    seconds = time.perf_counter() - began
    process.kill()
    process.wait()
    return {"seconds": seconds}


def written(process: subprocess.Popen[str], metrics: Path) -> None:
    """Waits for the line of a step in lorakit's file of metrics."""
    while not (metrics.exists() and '"loss"' in metrics.read_text()):
        if process.poll() is not None:
            raise SystemExit("lorakit ended before its first step")
        time.sleep(0.005)


def told(process: subprocess.Popen[str]) -> None:
    """Waits for a script's word."""
    assert process.stdout
    if not any("stepped" in line for line in iter(process.stdout.readline, "")):
        raise SystemExit("the script ended before its first step")


def fresh_output() -> Path:
    """A folder that is not there yet."""
    return scratch() / f"startup-{time.time_ns()}"


def lorakit_side(base: Path, rows: Path, checkout: Path | None = None) -> dict[str, float]:
    """`lorakit train` of this checkout, or of another."""
    folder, recipe = fresh_output(), scratch() / "startup.yaml"
    recipe.write_text(RECIPE.format(base=base, rows=rows, out=folder))
    command = python("-m", "lorakit.cli", "train", str(recipe))
    return until_first_step(command, lambda process: written(process, folder / "metrics.jsonl"), checkout)


def trainer_side(base: Path, rows: Path) -> dict[str, float]:
    """The script with PEFT and Trainer."""
    return until_first_step(python("-c", TRAINER, str(base), str(rows), str(fresh_output())), told)


def measure(pairs: int, before: Path | None = None) -> dict[str, Any]:
    """Both commands and the import of torch, in turn; `before`: and the command of another checkout."""
    base, rows = make_base(scratch(), "tiny", torch.float32), rows_file()
    sides = {
        "torch": lambda: until_first_step(python("-c", "import torch"), lambda process: process.wait()),
        "lorakit": lambda: lorakit_side(base, rows),
        "peft": lambda: trainer_side(base, rows),
    }
    if before:
        sides[BEFORE] = lambda: lorakit_side(base, rows, before)
    return {"shape": "tiny", **take_turns(sides, pairs)}


def show(result: dict[str, Any]) -> None:
    """The table."""
    lines = [("", "seconds to the first step", "/ peft")]
    for name, label in (("torch", "import torch"), ("lorakit", "lorakit train"), ("peft", "PEFT + Trainer")):
        lines.append((label, f"{middle(result[name]):.2f}", f"{ratio(result[name], result['peft']):.2f}"))
    table(lines)


def rates(result: dict[str, Any]) -> dict[str, float]:
    """The figure that the target speaks of."""
    return {"start to first step / peft": ratio(result["lorakit"], result["peft"])}


if __name__ == "__main__":
    program("startup", measure, show, pairs=5)
