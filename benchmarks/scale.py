"""How cost grows with size: bytes read at start, a million rows, step 1,000,000, a plan for DeepSeek-V3 (Z1 to Z5).

    python -m benchmarks.scale [--rows 1000000] [--keep]

The planned base is files with holes in the shapes of DeepSeek-V3. Commands are processes of their own: their processor
time, which other programs disturb little, and the most that was resident.
"""

import itertools
import json
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import program, python, scratch, table
from benchmarks.models import make_base

SMALL = 100  # times smaller
EXPERTS, LAYERS, DENSE, HIDDEN, NARROW = 256, 61, 3, 7168, 2048


def run(*arguments: str) -> tuple[float, int]:
    """Run lorakit; processor seconds of it and its processes, and the bytes that the largest held."""
    output = scratch() / "scale.log"
    with output.open("w") as log:
        files = [(os.POSIX_SPAWN_DUP2, log.fileno(), number) for number in (1, 2)]
        command = python("-m", "lorakit.cli", *arguments)
        process = os.posix_spawn(command[0], command, os.environ, file_actions=files)
    _, status, usage = os.wait4(process, 0)
    assert status == 0, output.read_text()
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def checked(rows: int) -> tuple[float, int]:
    """Check a recipe of so many rows, with no cache; the small base needs few seconds of its own."""
    folder = scratch() / "scale-check"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with (folder / "rows.jsonl").open("w") as file:
        for number in range(rows):
            turns = [("user", f"Say {number} twice."), ("assistant", f"{number} {number}")]
            messages = [{"role": role, "content": text} for role, text in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    recipe = folder / "recipe.json"
    data = {"train": str(folder / "rows.jsonl"), "max_tokens": 64}
    recipe.write_text(json.dumps({"base": {"model": "builtin:tiny"}, "data": data, "output": str(folder / "out")}))
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    return run("check", str(recipe))


def deepseek() -> Path:
    """The files of DeepSeek-V3 in bfloat16, with no values: 1.3 TB that take no room."""
    from transformers import DeepseekV3Config

    folder = scratch() / "deepseek-v3"
    if folder.exists():
        return folder
    staged = folder.with_name(f"{folder.name}-new")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    config = DeepseekV3Config()
    config.architectures = ["DeepseekV3ForCausalLM"]
    config.save_pretrained(staged)
    heads, rank = config.num_attention_heads, config.kv_lora_rank
    rope = config.qk_rope_head_dim
    shapes = {"model.embed_tokens.weight": (config.vocab_size, HIDDEN), "lm_head.weight": (config.vocab_size, HIDDEN),
              "model.norm.weight": (HIDDEN,)}  # fmt: skip
    for layer in range(LAYERS):
        attention = {
            "q_a_proj": (config.q_lora_rank, HIDDEN), "q_a_layernorm": (config.q_lora_rank,),
            "q_b_proj": (heads * (config.qk_nope_head_dim + rope), config.q_lora_rank),
            "kv_a_proj_with_mqa": (rank + rope, HIDDEN), "kv_a_layernorm": (rank,),
            "kv_b_proj": (heads * (config.qk_nope_head_dim + config.v_head_dim), rank),
            "o_proj": (HIDDEN, heads * config.v_head_dim),
        }  # fmt: skip
        names = {f"self_attn.{name}": shape for name, shape in attention.items()}
        names |= {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
        mlps = {"mlp": config.intermediate_size} if layer < DENSE else {"mlp.shared_experts": NARROW}
        if layer >= DENSE:
            names["mlp.gate"] = (EXPERTS, HIDDEN)
            shapes[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] = (EXPERTS,)
            mlps |= {f"mlp.experts.{expert}": NARROW for expert in range(EXPERTS)}
        for mlp, width in mlps.items():
            names |= {f"{mlp}.{name}": (width, HIDDEN) for name in ("gate_proj", "up_proj")}
            names[f"{mlp}.down_proj"] = (HIDDEN, width)
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in names.items()}
    header, stop = {}, 0
    for name, shape in shapes.items():
        begin, stop = stop, stop + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, stop]}
    text = json.dumps(header).encode()
    with (staged / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + stop)
    staged.rename(folder)
    return folder


def read_at_starts(shape: str) -> list[int]:
    """Bytes that a run of two processes reads in its first start on a base, and in its second one."""
    folder = scratch() / f"scale-start-{shape}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"text": f"say {number} twice"}) + "\n" for number in range(64))
    )
    parts = {
        "base": {"model": str(make_base(scratch(), shape, torch.float32)), "dtype": "float32"},
        "data": {"train": str(folder / "rows.jsonl")}, "train": {"steps": 1, "batch_size": 2},
        "parallel": {"backend": "fsdp2", "processes": 2},
    }  # fmt: skip
    num_bytes = [bytes_read()]
    for number in range(2):
        recipe = folder / f"{number}.json"
        recipe.write_text(json.dumps({**parts, "output": str(folder / f"out-{number}")}))
        run("train", str(recipe))
        num_bytes.append(bytes_read())
    return [after - before for before, after in itertools.pairwise(num_bytes)]


def bytes_read() -> int:
    """Bytes that this process has read, and all processes that it waited for."""
    facts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(facts["rchar"])


def starts() -> list[float]:
    """What both starts read of a base's weights, by their size: less what they read on a tiny base, such as modules."""
    small, large = "tiny", "100M"
    sizes = [sum(path.stat().st_size for path in make_base(scratch(), shape, torch.float32).glob("*.safetensors"))
             for shape in (small, large)]  # fmt: skip
    both = zip(read_at_starts(small), read_at_starts(large), strict=True)
    return [(of_large - of_small) / (sizes[1] - sizes[0]) for of_small, of_large in both]


def planned() -> tuple[float, int]:
    """Plan a recipe for it on H200s."""
    from lorakit.base.find import find_base

    folder = scratch() / "scale-plan"
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text(json.dumps({"text": "some text"}) + "\n")
    base = {"model": str(deepseek()), "tokenizer": str(find_base("builtin:tiny"))}
    data = {"train": str(folder / "rows.jsonl"), "max_tokens": 2048}
    recipe = folder / "recipe.json"
    recipe.write_text(json.dumps({"base": base, "data": data, "output": str(folder / "out")}))
    return run("plan", str(recipe), "--gpu", "H200", "--gpus", "8", "--nodes", "4")


def late_step() -> float:
    """Time of a step's rows and its line of metrics at step 1,000,000 / at step 1,000; medians of steps in turns."""
    from transformers import AutoTokenizer

    from lorakit.base.find import find_base
    from lorakit.data.find_rows import find_sources
    from lorakit.data.row_settings import RowSettings
    from lorakit.data.sampler import BatchSampler
    from lorakit.data.token_cache import no_progress, tokenize_sources
    from lorakit.run.metrics import Metrics

    rows = scratch() / "scale-steps.jsonl"
    rows.write_text("".join(json.dumps({"text": f"say {number} twice"}) + "\n" for number in range(10_000)))
    tokenizer = AutoTokenizer.from_pretrained(find_base("builtin:tiny"))
    table = tokenize_sources(find_sources((str(rows),), "train"), tokenizer, RowSettings(64), no_progress)
    sides = []
    for first in (1_000, 1_000_000):
        file = scratch() / f"scale-{first}.jsonl"
        file.write_text("".join(json.dumps({"step": step, "loss": 2.5}) + "\n" for step in range(first)))
        sides.append((first, BatchSampler(table, 64, 8, True, 0), Metrics(file, first)))
    seconds: dict[int, list[float]] = {first: [] for first, _, _ in sides}
    for number in range(1_000):
        for first, batches, metrics in sides:
            began = time.perf_counter()
            batches.step(first + number)
            metrics.write({"step": first + number, "loss": 2.5})
            seconds[first].append(time.perf_counter() - began)
    early, late = (statistics.median(each) for each in seconds.values())
    return late / early


def measure(rows: int) -> dict[str, Any]:
    """All of them; times of a row are without what a check of one row takes."""
    (start, held), (small, _), (large, most) = checked(1), checked(rows // SMALL), checked(rows)
    seconds, resident = planned()
    first_start, second_start = starts()
    return {
        "first start: read / base": first_start,
        "second start: read / base": second_start,
        "rows": rows,
        "a row: large / small": (large - start) / rows / ((small - start) / (rows // SMALL)),
        "bytes for a row": (most - held) / rows,
        "step 1,000,000 / step 1,000": late_step(),
        "plan: processor seconds": seconds,
        "plan: GB": resident / 1e9,
    }


def show(result: dict[str, Any]) -> None:
    """The table."""
    table([("", ""), *((name, f"{value:,.3g}") for name, value in result.items())])


if __name__ == "__main__":
    program("scale", measure, show, rows=1_000_000)
