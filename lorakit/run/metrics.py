"""Write and read metrics.jsonl, one JSON line per step or evaluation."""

import json
from pathlib import Path
from typing import Any

from lorakit.files.atomic import write_file


class Metrics:
    """Writer of metrics.jsonl. When a run resumes, lines after the last checkpoint are removed first."""

    def __init__(self, path: Path, last_step: int) -> None:
        lines = [line for line in read_metrics(path) if line["step"] <= last_step]
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
        except ValueError:
            continue
        if isinstance(value, dict) and isinstance(value.get("step"), int):
            lines.append(value)
    return lines
