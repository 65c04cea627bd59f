"""Of the processes of a machine, one reads the rows and the adapted weights in full; the others read neither."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lorakit.files.safetensors import open_tensors
from tests.helpers.ranks import as_rank, free_port

pytestmark = [pytest.mark.spread, pytest.mark.slow]

PROCESSES = 2
SCRIPT = """
import json, os, sys
from collections import Counter

opened, read = Counter(), Counter()
sys.addaudithook(lambda event, values: opened.update([str(values[0])]) if event == "open" else None)
read_bytes = os.preadv

def counted(handle, buffers, position):
    number = read_bytes(handle, buffers, position)
    read[os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))] += number
    return number

os.preadv = counted
import lorakit

lorakit.train(sys.argv[1])
print("counts", json.dumps([opened, read]))
"""


@pytest.mark.matrix
def test_one_process_of_a_machine_reads_rows_and_adapted_weights_in_full(
    recipe: Callable[..., Path], tmp_path: Path, base: Path
) -> None:
    path = recipe(train={"steps": 1, "warmup_steps": 0}, parallel={"backend": "ddp", "processes": PROCESSES})
    (tmp_path / "script.py").write_text(SCRIPT)
    port = free_port()
    command = [sys.executable, str(tmp_path / "script.py"), str(path)]
    ranks = [
        subprocess.Popen(
            command, env=os.environ | as_rank(rank, PROCESSES, port), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(PROCESSES)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * PROCESSES, "\n".join(outputs)
    counts = [
        json.loads(line.removeprefix("counts "))
        for output in outputs
        for line in output.splitlines()
        if line.startswith("counts ")
    ]
    rows = json.loads(path.read_text())["data"]["train"]
    weights = max(base.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    assert [opened.get(rows, 0) > 0 for opened, _ in counts] == [True, False]
    adapted = sum(
        math.prod(entry.shape) * 4
        for name, entry in open_tensors(weights).entries.items()
        if name.endswith("proj.weight")
    )
    reads = [read.get(weights.name, 0) for _, read in counts]
    assert adapted <= reads[0] < 2 * weights.stat().st_size
    assert reads[1] == 0
