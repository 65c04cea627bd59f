"""Write and read metrics.jsonl, one JSON line per step or evaluation."""

import json
import sys
from pathlib import Path
from typing import Any

from lorakit.files.atomic import write_file


class Metrics:
    """Writer of metrics.jsonl. When a run resumes, lines after the last checkpoint are removed first.

    A file with a damaged line, other than a last one that a crash has cut, stays as metrics.jsonl.damaged.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        all_lines = read_metrics(path)
        lines = [line for line in all_lines if line["step"] <= last_step]
        if path.exists() and len(all_lines) < path.read_bytes().count(b"\n"):
            damaged = path.rename(f"{path}.damaged")
            print(f"note: {damaged} has lines that cannot be read; {path.name} goes on without them", file=sys.stderr)
        write_file(path, "".join(json.dumps(line) + "\n" for line in lines))
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
        self._evaluated = {line["step"] for line in lines if "eval_loss" in line}

    def write(self, values: dict[str, Any]) -> None:
        """Append one line, unless it is an evaluation that the file already has, as after a resume."""
        if "eval_loss" in values and values["step"] in self._evaluated:
            return
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a metrics file; one cut by a crash, or damaged, is left out."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and isinstance(value.get("step"), int):
            lines.append(value)
    return lines
