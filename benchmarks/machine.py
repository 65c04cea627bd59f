"""What the figures were measured on, and how they are kept."""

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def facts() -> dict[str, Any]:
    """Hardware, versions, date."""
    versions = {}
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


def table(rows: list[tuple[str, ...]]) -> None:
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


def matmul_rate(base: Path, num_tokens: int) -> float:
    """Operations per second of torch's matmul, float32, over the shapes of a base's layers: the ceiling of a step."""
    config = json.loads((base / "config.json").read_text())
    h, i = config["hidden_size"], config["intermediate_size"]
    kv = h * config["num_key_value_heads"] // config["num_attention_heads"]
    shapes = [(h, h), (h, kv), (h, kv), (h, h), (h, i), (h, i), (i, h), (h, config["vocab_size"])]
    pairs = [(torch.randn(num_tokens, one), torch.randn(one, other)) for one, other in shapes]
    best = []
    for _ in range(5):
        began = time.perf_counter()
        for x, w in pairs:
            x @ w
        best.append(time.perf_counter() - began)
    return sum(2.0 * num_tokens * one * other for one, other in shapes) / statistics.median(best)


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _commit() -> str | None:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def python(*arguments: str) -> list[str]:
    """The command line of this Python."""
    return [sys.executable, *arguments]
