"""Output folders of runs, made from a finished one, and the workers of a run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

END = ("results", "peak_memory_bytes", "ranks", "steps", "tokens", "label_tokens", "facts_of_end")


def copy_run(run: Path, copy: Path, change: Callable[[dict[str, Any]], Any] = lambda record: None) -> Path:
    """Copy a run, and change the values of its record."""
    shutil.copytree(run, copy)
    record = json.loads((copy / "run.json").read_text())
    change(record)
    (copy / "run.json").write_text(json.dumps(record))
    return copy


def interrupted_copy(run: Path, copy: Path, step: int) -> Path:
    """Copy a run as it was after a step, before it ended."""

    def unfinish(record: dict[str, Any]) -> None:
        for key in END:
            record.pop(key, None)
        record["status"] = "running"
        record["engine"].pop("peak_memory_bytes")

    copy_run(run, copy, unfinish)
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= step))
    return copy


def workers_of(launcher: int) -> list[int]:
    """Return the process ids of a launcher's workers, by rank: they are started in this order."""
    workers = psutil.Process(launcher).children()
    return [worker.pid for worker in sorted(workers, key=lambda worker: (worker.create_time(), worker.pid))]
