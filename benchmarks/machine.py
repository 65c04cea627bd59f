"""What the figures were measured on, its ceilings, and how they are shown and kept."""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
CPU = torch.device("cpu")
Result = dict[str, Any]


def facts() -> dict[str, Any]:
    """Hardware, versions, date."""
    versions: dict[str, str | None] = {}
    for name in ("torch", "transformers", "accelerate", "peft", "safetensors"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "hardware": hardware(), "threads": torch.get_num_threads(), "python": platform.python_version(),
        "versions": versions, "date": datetime.now(UTC).date().isoformat(), "commit": _commit(),
    }  # fmt: skip


def hardware() -> str:
    """A short name for this machine."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    model = next((line.split(":")[1] for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "cpu")
    return f"{os.cpu_count()} x {model.strip()}"


def keep(name: str, result: dict[str, Any]) -> Path:
    """Write a result as benchmarks/results/NAME-HARDWARE.json."""
    RESULTS.mkdir(exist_ok=True)
    where = "".join(letter if letter.isalnum() else "-" for letter in hardware().lower())
    path = RESULTS / f"{name}-{'-'.join(part for part in where.split('-') if part)}.json"
    path.write_text(json.dumps({**facts(), **result}, indent=1) + "\n")
    print(f"kept in {path}")
    return path


def table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows in columns, the first left and the others right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        cells.insert(0, f"{row[0]:<{widths[0]}}")
        print("  ".join(cells).rstrip())


def scratch() -> Path:
    """Where models and patches of the benchmarks are kept between runs."""
    folder = Path(os.environ.get("LORAKIT_BENCH", Path.home() / ".cache" / "lorakit-bench"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def rss_bytes() -> int:
    """Resident memory of this process."""
    return int(_lines("/proc/self/statm")[0].split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    """The most that was resident in this process; ru_maxrss would begin with what the parent process held."""
    return int(next(line for line in _lines("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024


def now(device: torch.device = CPU) -> float:
    """Seconds, once the device has done what it was told to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def matmul_rate(
    shape: Mapping[str, Any], num_tokens: int, dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> float:
    """Operations per second of torch's matmul over the shapes of a base's layers: the ceiling of a step."""
    h, i = shape["hidden_size"], shape["intermediate_size"]
    kv = h * shape["num_key_value_heads"] // shape["num_attention_heads"]
    sizes = [(h, h), (h, kv), (h, kv), (h, h), (h, i), (h, i), (i, h), (h, shape["vocab_size"])]
    random = partial(torch.randn, dtype=dtype, device=device)
    pairs = [(random(num_tokens, one), random(one, other)) for one, other in sizes]

    def work() -> None:
        for x, w in pairs:
            x @ w

    operations = sum(2.0 * num_tokens * one * other for one, other in sizes)
    return float(operations / _seconds(work, device))


def copy_rate(device: torch.device = CPU) -> float:
    """Bytes per second that are read and written while a large tensor is copied."""
    source = torch.ones(1 << (30 if device.type == "cuda" else 28), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2.0 * source.nbytes / _seconds(lambda: target.copy_(source), device)


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """The median of five, after one."""
    found = []
    for _ in range(6):
        began = now(device)
        work()
        found.append(now(device) - began)
    return statistics.median(found[1:])


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _commit() -> str | None:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def python(*arguments: str) -> list[str]:
    """The command line of this Python."""
    return [sys.executable, *arguments]


def run_ranks(module: str, processes: int, *arguments: str) -> Any:
    """Run a module in so many processes, and return the JSON that one of them prints last."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m", module)
    done = subprocess.run(python(*launcher, *arguments), capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(lines[-1])


def program(
    name: str,
    measure: Callable[..., Result],
    show: Callable[[Result], None],
    process: Callable[..., None] | None = None,
    **own: Any,
) -> None:
    """The command line of a benchmark: measures, shows, and with --keep keeps under its name, filled in with options.

    ``process``: what each process that ``run_ranks`` started does with its arguments. ``own``: option -> its default,
    handed to ``measure``; of a tuple of choices the first, False for a switch.
    """
    if process is not None and "LOCAL_RANK" in os.environ:
        process(*sys.argv[1:])
        return
    parser = argparse.ArgumentParser()
    for option, default in own.items():
        told: dict[str, Any] = {"type": type(default), "default": default}
        if default is False:
            told = {"action": "store_true"}
        elif isinstance(default, tuple):
            told = {"choices": default, "default": default[0]}
        parser.add_argument(f"--{option.replace('_', '-')}", **told)
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/")
    options = vars(parser.parse_args())
    keeps = options.pop("keep")
    print(hardware())
    result = measure(**options)
    show(result)
    if keeps:
        keep(name.format(**options), result)
