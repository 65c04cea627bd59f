"""From a command's start to the end of its first step: `lorakit train` beside a script with PEFT and Trainer (C5).

Also the whole of short commands (C5b): `check`, `show`, `plan` and `generate` of one token, on the built-in base.

    python -m benchmarks.startup [--pairs 5] [--keep]

Both read the same rows, put the same adapter on the same tiny base and train; a command is stopped after its first
step. The importing of torch, and of torch and transformers, is measured beside them: what needs them cannot be faster.
"""

import json
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import program, python, scratch, table
from benchmarks.models import make_base, make_patch
from benchmarks.turns import BEFORE, Step, middle, ratio, take_turns
from lorakit.base.find import find_base

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


TRANSFORMERS = "import torch; from transformers import AutoTokenizer, LlamaForCausalLM"
COMMANDS = {
    "check": ("check", "{recipe}"), "show": ("show", "{patch}"), "plan": ("plan", "{recipe}"),
    "generate": ("generate", "builtin:tiny", "--prompt", "Mira", "--max-new-tokens", "1"),
}  # fmt: skip
"""short command -> its arguments"""


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


def until_ended(*arguments: str) -> dict[str, float]:
    """Seconds until a Python process has ended."""
    return until_first_step(python(*arguments), lambda process: process.wait())


def command(name: str, rows: Path) -> dict[str, float]:
    """Seconds of a short command on the built-in base."""
    recipe, patch = scratch() / f"startup-{name}.yaml", make_patch(scratch(), find_base("builtin:tiny"), rank=8, seed=0)
    recipe.write_text(RECIPE.format(base="builtin:tiny", rows=rows, out=scratch() / "startup-none"))
    return until_ended("-m", "lorakit.cli", *(part.format(recipe=recipe, patch=patch) for part in COMMANDS[name]))


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
    sides: dict[str, Step] = {
        "torch": lambda: until_ended("-c", "import torch"),
        "transformers": lambda: until_ended("-c", TRANSFORMERS),
        **{name: partial(command, name, rows) for name in COMMANDS},
        "lorakit": lambda: lorakit_side(base, rows),
        "peft": lambda: trainer_side(base, rows),
    }
    if before:
        sides[BEFORE] = lambda: lorakit_side(base, rows, before)
    return {"shape": "tiny", **take_turns(sides, pairs)}


def show(result: dict[str, Any]) -> None:
    """The table."""
    lines = [("", "seconds", "/ peft", "/ import torch")]
    labels = {
        "torch": "import torch",
        "transformers": "import torch, transformers",
        "lorakit": "lorakit train, first step",
    }
    labels |= {"peft": "PEFT + Trainer, first step", **{name: f"lorakit {name}" for name in COMMANDS}}
    for name, label in labels.items():
        beside_peft, beside_torch = (f"{ratio(result[name], result[other]):.2f}" for other in ("peft", "torch"))
        lines.append((label, f"{middle(result[name]):.2f}", beside_peft, beside_torch))
    table(lines)


def rates(result: dict[str, Any]) -> dict[str, float]:
    """The figures that the targets speak of."""
    commands = {f"{name} / import torch": ratio(result[name], result["torch"]) for name in COMMANDS}
    return {"start to first step / peft": ratio(result["lorakit"], result["peft"]), **commands}


if __name__ == "__main__":
    program("startup", measure, show, pairs=5)
