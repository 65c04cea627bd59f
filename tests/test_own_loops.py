"""The programs of docs/your-own-loop.md run as they stand, and train: PEFT's logits are compared at their ends."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from lorakit.base.find import find_base

PAGE = Path(__file__).parent.parent / "docs" / "your-own-loop.md"
BLOCK = r"```python\n(# [^\n]*?(\w+)\.py BASE OUT\n.*?)```"
PROGRAMS = {name: code for code, name in re.findall(BLOCK, PAGE.read_text(), re.S)}
IN_MAKE_TEST = ("plain",)


def test_programs_are_short_and_say_how_they_are_started() -> None:
    assert len(PROGRAMS) == PAGE.read_text().count("```python") == 7
    assert all(len(code.splitlines()) <= 60 for code in PROGRAMS.values())


@pytest.mark.spread
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_MAKE_TEST else [pytest.mark.matrix]) for name in PROGRAMS]
)
def test_a_program_trains_a_patch_that_peft_reads(tmp_path: Path, name: str) -> None:
    code = PROGRAMS[name]
    (tmp_path / f"{name}.py").write_text(code)
    several = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
    ]
    start = several if code.startswith("# torchrun") else []
    command = [sys.executable, *start, f"{name}.py", str(find_base("builtin:tiny")), "out"]

    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280
    )

    assert done.returncode == 0, done.stderr[-2000:]
    for file in (tmp_path / "out").rglob("adapter_model.safetensors"):
        assert all(tensor.abs().max() > 0 for key, tensor in load_file(file).items() if "lora_B" in key)
    assert list((tmp_path / "out").rglob("adapter_model.safetensors"))
